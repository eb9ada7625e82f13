"""The norm of heads, as kernels and what stands for them on a CPU take it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMS norm of every query and of every key, before they are rotated."""

    queries: Tensor
    keys: Tensor
    eps: float
    unit: bool
    """See `norm.add_norm`."""
