"""The forward of a model: its fused one, or that of transformers' own modules, with our attention."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from paddock.models.attention import NAME, Attention, no_mask
from paddock.models.experts import ARGUMENT, Routing

FUSED = "paddock_fused"
"""The attribute of a backbone that holds its fused forward, if it has one."""


def hidden_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, how: Attention, routing: Routing | None = None
) -> Tensor:
    """Returns the last hidden states ``[N, L, hidden]`` of a causal LM, or of a bare backbone; ``positions [N, L]``.

    The model's fused forward computes them if it has one (see models/fused), else its modules.
    """
    decoder = vars(model.base_model).get(FUSED)
    if decoder:  # one without experts
        return decoder.hidden(tokens, positions, how)
    return module_states(model, tokens, positions, how, routing)


def module_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, how: Attention, routing: Routing | None = None
) -> Tensor:
    """Returns the last hidden states as transformers' own modules compute them."""
    loaded_with = model.config._attn_implementation
    if loaded_with != NAME:
        raise ValueError(f"the model must be loaded with attn_implementation={NAME!r}, not {loaded_with!r}")
    return model.base_model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=no_mask(tokens.device),
        use_cache=False,
        attend=how,
        **({ARGUMENT: routing} if routing else {}),
    ).last_hidden_state
