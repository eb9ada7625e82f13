"""Attention of short packed sequences on a CPU, by one kernel each way that reads the stream as it is.

A product of so few rows costs a processor's matrix unit more to begin than to compute, and blocks.py has five of them a
block in backward alone, with copies into rectangles and out of them. The matrix unit wins where sequences are long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paddock.kernels import native
from paddock.kernels.arguments import VECTOR, Families

MOST_KEYS = 512
"""Of the longest sequence, with those before it."""


def is_short(q: Tensor, k: Tensor, v: Tensor, most_keys: int) -> bool:
    fits = most_keys <= MOST_KEYS and q.shape[-1] == v.shape[-1] and q.shape[-1] % VECTOR == 0
    return fits and len(q) > 0 and native.can_run(q, k, v)


class FamilyAttention(torch.autograd.Function):
    """``(q [T, H, D], k, v [T, K, D], families, scale) -> [T, H, D]``. Only q, k and v are kept for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, families: Families, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.save_for_backward(q, k, v)
        ctx.how = families, scale
        return native.family_attention(q, k, v, families, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), (families, scale) = ctx.saved_tensors, ctx.how
        return *native.family_attention_backward(q, k, v, grads[0].contiguous(), families, scale), None, None
