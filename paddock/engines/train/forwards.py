"""Parts of the forward pass that backends share: types, inputs, statistics per state, columns per token."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from paddock.core.batch import Batch
from paddock.engines.train.outputs import CHOICE_COLUMNS, EXPERT_COLUMNS, TOPK_COLUMNS, Outputs, Want
from paddock.engines.train.routers import Routers
from paddock.engines.train.settings import Settings
from paddock.errors import UserError
from paddock.models.attention import Packed
from paddock.models.packing import Inputs, pack, pad
from paddock.models.sharing import pack_shared
from paddock.models.token_choices import likeliest_tokens, log_probs_of
from paddock.models.token_stats import Head, token_stats
from paddock.models.ulysses import SumOfSlices, joined_slices
from paddock.models.value_head import ValueModel

log = logging.getLogger(__name__)


def backbone_of(model: nn.Module) -> PreTrainedModel:
    """Returns the transformers module of a language model or of a model with a value head."""
    backbone = model.backbone if isinstance(model, ValueModel) else model
    assert isinstance(backbone, PreTrainedModel)
    return backbone


def kept_wide(model: nn.Module) -> set[str]:
    """Returns the names of modules that compute in float32: the value head, and what transformers keeps so."""
    backbone = backbone_of(model)
    kept = {*(backbone._keep_in_fp32_modules or ()), *(backbone._keep_in_fp32_modules_strict or ())}
    return {"value_head", *kept}


def compute_dtypes(model: nn.Module, compute: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the type of each parameter that the model computes with in `compute`; others keep theirs."""
    kept = kept_wide(model)
    return {name: compute for name, _ in model.named_parameters() if kept.isdisjoint(name.split("."))}


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that the model's files hold."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def tell_unfused(backbone: PreTrainedModel, settings: Settings, reason: str | None) -> None:
    """Refuses exact numerics for a decoder that cannot run in few kernels; else logs the reason, if there is one."""
    if reason and settings.exact:
        raise UserError(
            f"{backbone.config.model_type} runs by its modules' own forward: {reason}",
            key="actor_rollout_ref.numerics",
            value="exact",
            fix="actor_rollout_ref.numerics=fast",
        )
    if reason and backbone.device.type != "cpu":
        log.info("%s runs by its modules' own forward: %s", backbone.config.model_type, reason)


def shares_prompts(settings: Settings, routers: Routers, why_not: str | None = None) -> bool:
    """Tells whether a group's prompt is computed once. If it cannot be, that is refused if it was asked for."""
    reasons = (
        (not settings.packed, "rows that are padded are computed alone"),
        (settings.exact, "exact numerics compute each row alone"),
        (routers.experts, "balancing experts counts the tokens of each row"),
    )
    why_not = why_not or next((why for holds, why in reasons if holds), None)
    if why_not and settings.share_prompts:
        raise UserError(why_not, key="actor_rollout_ref.actor.use_prefix_grouper", value=True, fix="leave it out")
    return not why_not and settings.share_prompts is not False


def inputs_of(batch: Batch, device: torch.device, packed: bool = True, share: bool = False) -> Inputs:
    shared = pack_shared(batch, device) if share else None
    return shared or (pack if packed else pad)(batch, device)


def never_empty(batch: Batch, device: torch.device, packed: bool = True, share: bool = False) -> Inputs:
    """Returns one token as the input of a rank that has none, and must run the model with the others."""
    inputs = inputs_of(batch, device, packed, share) if len(batch) else None
    if inputs is not None and inputs.tokens.numel():
        return inputs
    zero, none = (torch.zeros(size, dtype=torch.long, device=device) for size in ((1, 1), (0,)))
    shape = len(batch), batch.need("responses").shape[1]
    mask = None if packed else torch.ones_like(zero)
    return Inputs(zero, zero, Packed([1], device) if packed else None, mask, states=none, targets=none, places=none,
                  shape=shape, cells=zero[0] - 1)  # fmt: skip


def choices_of(batch: Batch, inputs: Inputs, want: Want) -> Tensor | None:
    """Returns the tokens ``[N, k]`` whose log-probs are wanted at each hidden state, if any are."""
    if not want & CHOICE_COLUMNS:
        return None
    return batch.need("teacher_tokens").flatten(0, 1).to(inputs.places.device)[inputs.places]


def token_columns(
    hidden: Tensor, head: Head, inputs: Inputs, want: Want, settings: Settings, choices: Tensor | None
) -> dict[str, Tensor]:
    """Returns statistics ``[N]``, or ``[N, k]``, of a language model's distributions at the wanted hidden states."""
    found: dict[str, Tensor] = {}
    temperature = settings.temperature
    if want & TOPK_COLUMNS:
        tokens, log_probs = likeliest_tokens(hidden, head, settings.topk, temperature)
        found |= {"topk_tokens": tokens, "topk_log_probs": log_probs}
    if choices is not None:
        log_probs, kth = log_probs_of(hidden, head, choices, temperature)
        found |= {"choice_log_probs": log_probs, "kth_log_probs": kth}
    if plain := want - TOPK_COLUMNS - CHOICE_COLUMNS:
        entropy, squares = "entropy" in want, "sum_pi_squared" in want
        stats = token_stats(hidden, head, inputs.targets, temperature, entropy=entropy, sum_pi_squared=squares)
        found |= {name: getattr(stats, name) for name in plain}
    return found


def per_state(
    model: PreTrainedModel | ValueModel, inputs: Inputs, want: Want, settings: Settings, choices: Tensor | None
) -> dict[str, Tensor]:
    """Returns values or statistics at the hidden states that the inputs ask for."""
    if isinstance(model, ValueModel):
        return {"values": model.values(inputs.hidden(model.backbone))}
    return token_columns(inputs.hidden(model), Head.of(model), inputs, want, settings, choices)


def zeros(name: str, shape: tuple[int, int], batch: Batch, settings: Settings, device: torch.device) -> Tensor:
    """Returns a column of zeros for a batch of this shape, with several of a token where the column has several."""
    k: tuple[int, ...] = (settings.topk,) if name in TOPK_COLUMNS else ()
    if name == "choice_log_probs":
        k = tuple(batch.need("teacher_tokens").shape[2:])
    return torch.zeros(*shape, *k, dtype=torch.long if name == "topk_tokens" else torch.float32, device=device)


def outputs_of(
    found: dict[str, Tensor],
    inputs: Inputs,
    batch: Batch,
    want: Want,
    routers: Routers,
    slices: dist.ProcessGroup | None = None,
) -> Outputs:
    """Puts values of hidden states at their tokens; `slices` are the ranks that share each sequence."""
    columns: dict[str, Any] = {name: inputs.per_token(found[name]) for name in sorted(want - EXPERT_COLUMNS)}
    experts = routers.columns(inputs, batch, want)
    if slices:
        columns = {name: SumOfSlices.apply(column, slices) for name, column in columns.items()}
        experts = {name: joined_slices(column, slices) for name, column in experts.items()}
    return Outputs(**columns, **experts, routing=inputs.routing)
