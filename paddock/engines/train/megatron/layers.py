"""Replacements of Transformer Engine in Megatron's layers: attention over packed sequences, and norms.

Attention is Paddock's own, with the family's own rotary embedding: the same on a CPU and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from paddock.models.attention import Packed, Scores


@dataclass(frozen=True, eq=False)
class How:
    """Says what the queries of one forward attend to; Megatron's layers pass it on as their packing parameters."""

    packed: Packed
    cos: Tensor
    sin: Tensor
    qkv_format: str = "sbhd"
    """Tokens stay in the first dimension, beside a batch of one."""


def traits(attention: nn.Module) -> SimpleNamespace:
    """Returns what a family's attention module knows beside its weights, which must not stay in memory."""
    found = {name: value for name, value in vars(attention).items() if not name.startswith("_")}
    norm = getattr(attention, "kv_a_layernorm", None)
    return SimpleNamespace(**found, epsilon=norm.variance_epsilon if norm is not None else None)


class PackedAttention(nn.Module):
    """Megatron's core attention: between the projections. ``[T, 1, H, D] -> [T, 1, H * Dv]``"""

    def __init__(self, layers: list[Any], rotate: Callable[..., Any], config: Any, layer_number: int, **unused: Any):
        super().__init__()
        theirs = layers[layer_number - 1]
        self.rotate = rotate
        self.scaling = float(theirs.scaling)
        self.layer_idx = layer_number - 1
        alike = not getattr(theirs.config, "layer_types", None)
        everywhere = getattr(theirs.config, "sliding_window", None) if alike else None
        self.window = getattr(theirs, "sliding_window", None) or everywhere or None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, packed_seq_params: How, **unused: Any
    ) -> Tensor:
        how = packed_seq_params
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        query, key = self.rotate(query, key, how.cos, how.sin)
        found = how.packed.attend(self, query, key, value, Scores(self.scaling, self.window))
        return found.flatten(2).transpose(0, 1)


class MegatronNorm(nn.Module):
    """RMSNorm. Ranks that share tokens have a part of its gradient each."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)
