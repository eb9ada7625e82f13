"""The interface of attention: what a forward is asked with, and what one layer asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from paddock.kernels.arguments import Scores


class Attention(Protocol):
    """Says what the queries of one forward attend to."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Computes the attention of one layer; called in the order of the layers, ``module.layer_idx`` says which.

        ``query [N, H, L, D]``, ``key`` and ``value`` ``[N, K, L, D]`` with ``K`` dividing ``H``, after the rotary
        embedding, belong to this forward's tokens alone: an object with a cache writes them into it here, and reads
        from it. Returns ``[N, L, H, Dv]``.
        """
        ...


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one layer asks for. Packed: ``q [T, H, D]``, ``k, v [T, K, D]``; in rows: ``[N, heads, L, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Scores
    most_keys: int
    """Keys that the last token of the longest sequence sees, without a window."""


def layer_of(module: nn.Module) -> int:
    """Returns the number of an attention module's layer, from 0."""
    return int(module.layer_idx)  # type: ignore[arg-type]
