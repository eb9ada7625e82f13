"""act(gate) * up of a gated MLP, from one projection of both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paddock.kernels.arguments import ACTIVATIONS
from paddock.kernels.launch import early

BLOCK = 1024


@triton.jit
def activation(x, KIND: tl.constexpr):
    """The value and the slope of silu (0) or of gelu by tanh (1)."""
    if KIND == 0:
        s = 1.0 / (1.0 + tl.exp(-x))
        value, slope = x * s, s * (1.0 + x * (1.0 - s))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        t = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
        value = 0.5 * x * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3 * 0.044715 * x * x)
    return value, slope


@triton.jit
def gate(BOTH, OUT, columns, stride, KIND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(BOTH + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + row * stride + columns + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = activation(x, KIND)
    tl.store(OUT + row * columns + column, (value * up).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(DOUT, BOTH, DBOTH, OUT, columns, stride, dstride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient, and the output once more: it is read for the next gradient, and need not be kept until then."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at, dat = row * stride + column, row * dstride + column
    x = tl.load(BOTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + at + columns, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(DOUT + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = activation(x, KIND)
    tl.store(DBOTH + dat, (dout * up * slope).to(DBOTH.dtype.element_ty), mask=inside)
    tl.store(DBOTH + dat + columns, (dout * value).to(DBOTH.dtype.element_ty), mask=inside)
    tl.store(OUT + row * columns + column, (value * up).to(OUT.dtype.element_ty), mask=inside)


def gated(both: Tensor, activation_name: str) -> Tensor:
    """``[T, 2 I] -> [T, I]``; there may be other numbers between the rows."""
    rows, columns = len(both), both.shape[1] // 2
    out, soon = both.new_empty(rows, columns), early(both.device)
    if rows:
        gate[(rows, triton.cdiv(columns, BLOCK))](
            both, out, columns, both.stride(0), ACTIVATIONS[activation_name], BLOCK, bool(soon), num_warps=4, **soon
        )
    return out


def gated_backward(dout: Tensor, both: Tensor, activation_name: str, room: int = 0) -> tuple[Tensor, Tensor]:
    """The gradient of `both`, with `room` more columns that are left as they are, and ``gated(both)``."""
    columns, out = dout.shape[1], torch.empty_like(dout)
    dboth = both.new_empty(len(both), 2 * columns + room)
    gate_backward[(len(both), triton.cdiv(columns, BLOCK))](
        dout, both, dboth, out, columns, both.stride(0), dboth.stride(0), ACTIVATIONS[activation_name], BLOCK,
        num_warps=4,
    )  # fmt: skip
    return dboth, out
