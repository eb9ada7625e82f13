"""One attention function for packed training, prefill and decode, registered with transformers as ``paddock``.

Every forward says by an object of its own what its queries attend to: `hidden_states(model, tokens, positions, how)`
hands `how` through the model's layers to `attention_forward`, which calls `how.attend(...)` once a layer. It travels as
an argument, so it is there again when a checkpointed layer runs a second time, in whichever thread that happens.

`Packed` is the kind for training and prefill: sequences end to end in one row. An engine with a KV cache brings its own
(see `Attention`). Without such an object the function is transformers' plain SDPA with its usual masks, so that a model
loaded with it also pads, generates and evaluates as any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from paddock.core.device import flash_attention, has_flash
from paddock.errors import UserError
from paddock.kernels.arguments import Families
from paddock.models.blocks import Block, BlockAttention, blocks_of
from paddock.models.experts import ARGUMENT, Routing
from paddock.models.families import FamilyAttention, is_short
from paddock.models.sinks import packed_sinks, padded_sinks

NAME = "paddock"
FUSED = "paddock_fused"  # where a backbone keeps its fused forward, if it has one
MAX_FLASH_HEAD_DIM = 256


class Attention(Protocol):
    """What the queries of one forward attend to."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Called once a layer, in the order of the layers; ``module.layer_idx`` tells which.

        ``query [N, H, L, D]``, ``key`` and ``value`` ``[N, K, L, D]`` with ``K`` dividing ``H``, after the rotary
        embedding, of this forward's tokens alone: who has a cache writes them into it here, and reads from it. A query
        at position p sees keys at p - window + 1 .. p, or at 0 .. p without a window. Scores are ``scaling * q.k``,
        then ``softcap * tanh(score / softcap)`` where one is set; ``sinks [H]`` stand beside them (see sinks.py), where
        an object knows them. Returns ``[N, L, H, Dv]``.
        """
        ...


class Packed:
    """Sequences end to end in one row ``[1, T]``, each attending to itself, causally.

    Off the GPU, and for what flash attention cannot do, neighbours of similar length are computed together: sequences
    sorted by length make the fewest and fullest blocks.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu"):
        self.lengths = list(lengths)
        self.may_grow = True
        """May tokens come behind the last sequence? On a CPU they attend to nothing, and get zeros."""
        self.max_len = max(self.lengths, default=0)
        self.device = torch.device(device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 ``[sequences + 1]``: where each begins, and where the last one ends."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def tiles(self) -> Tensor:
        """For the kernel of exact numerics."""
        from paddock.kernels.packed import tiles_of

        return tiles_of(self.lengths, self.device)

    @cached_property
    def blocks(self) -> list[Block]:
        return blocks_of(self.lengths, self.device)

    @cached_property
    def families(self) -> Families:
        ends = accumulate(self.lengths)
        return Families([[slice(end - length, end)] for end, length in zip(ends, self.lengths, strict=True)])

    def without_flash(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Where flash attention cannot: ``q [T, H, D]``, ``k, v [T, K, D] -> [T, H, D]``."""
        if window is None and softcap is None and is_short(q, k, v, self.max_len):
            found: Any = FamilyAttention.apply(q, k, v, self.families, scaling)
        else:
            found = BlockAttention.apply(q, k, v, self.blocks, scaling, window, softcap)
        return found

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, H or K, D]
        window = None if window is None or window >= self.max_len else window
        if sinks is not None:
            packed: Any = packed_sinks(q, k, v, self.blocks, scaling, window, sinks)
        elif flash_can(q, v, window, softcap):
            packed = flash_attention(q, k, v, self.cu_seqlens, self.lengths, scaling, window)
        else:
            packed = self.without_flash(q, k, v, scaling, window, softcap)
        return packed.unsqueeze(0)


def flash_can(query: Tensor, value: Tensor, window: int | None, softcap: float | None) -> bool:
    same_dims = query.shape[-1] == value.shape[-1] <= MAX_FLASH_HEAD_DIM
    return has_flash(query, window) and same_dims and softcap is None


def hidden_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, how: Attention, routing: Routing | None = None
) -> Tensor:
    """The last hidden states ``[N, L, hidden]`` of a causal LM, or of a bare backbone; ``positions [N, L]``.

    By the model's fused forward, if it has one (see models/fused), else by its modules.
    """
    decoder = vars(model.base_model).get(FUSED)
    if decoder:  # one without experts
        return decoder.hidden(tokens, positions, how)
    return module_states(model, tokens, positions, how, routing)


def module_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, how: Attention, routing: Routing | None = None
) -> Tensor:
    """By transformers' own modules."""
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


def no_mask(device: torch.device) -> Tensor:
    """transformers takes any mask of four dimensions for a finished one, and builds none of its own."""
    return torch.empty(1, 1, 0, 0, device=device)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attend: Attention | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention module of a model loaded with ``attn_implementation="paddock"``."""
    if kwargs.get("position_bias") is not None:
        raise unsupported(module, "position biases")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attend is not None:
        if s_aux is None:
            return attend.attend(module, query, key, value, scale, sliding_window, softcap), None
        if "sinks" not in inspect.signature(attend.attend).parameters:
            raise unsupported(module, "attention sinks", "actor_rollout_ref.rollout.name=hf")
        return attend.attend(module, query, key, value, scale, sliding_window, softcap, sinks=s_aux), None
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        raise unsupported(module, "layers that keep arguments from their attention")
    if s_aux is not None:
        return padded_sinks(query, key, value, attention_mask, scale, s_aux), None
    if softcap is not None:
        return capped_attention(module, query, key, value, attention_mask, scaling, softcap), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def capped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """softmax(c tanh(s q k / c)) v over a padded batch; ``mask`` is True where a key is seen, None: causal."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(key.shape[2] - query.shape[2])
    weights = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


def unsupported(module: nn.Module, what: str, fix: str | None = None) -> UserError:
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", type(module).__name__)
    return UserError(
        f"{family} models have {what}, which packed attention does not know",
        key="actor_rollout_ref.model.path",
        value=getattr(config, "name_or_path", None) or None,
        fix=fix or "use a model of another family: docs/models.md lists those that are tested",
    )


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
