"""Attention of short packed sequences on a CPU, by one kernel each way that reads the stream as it is.

A product of so few rows costs a processor's matrix unit more to begin than to compute, and blocks.py has five of them a
block in backward alone, with copies into rectangles and out of them. The matrix unit wins if sequences are long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paddock.kernels import native
from paddock.kernels.arguments import PromptGroups


class ShortAttention(torch.autograd.Function):
    """``(q [T, H, D], k, v [T, K, D], groups, scale) -> [T, H, D]``. Only q, k and v are kept for backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: PromptGroups, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ctx.save_for_backward(q, k, v)
        ctx.how = groups, scale
        return native.short_attention(q, k, v, groups, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v), (groups, scale) = ctx.saved_tensors, ctx.how
        return *native.short_attention_backward(q, k, v, grads[0].contiguous(), groups, scale), None, None
