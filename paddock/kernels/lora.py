"""Adapters beside a product, B A x, from A x on: for all layers that read the same input in one launch each way.

Adapters of one rank r: the matrices B lie below one another ``[columns, r]``, and A x has r columns for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paddock.kernels.launch import early, power_of_two

ROWS, COLUMNS, DEPTH = 64, 128, 64  # of one program, however many rows there are: exact numerics need that
MOST = 3
"""Layers that read the same input."""
LEAST = 16
"""Rows, columns and depth of the smallest product of a program."""


@triton.jit
def pick(pair, first, second, third):
    return tl.where(pair == 0, first, tl.where(pair == 1, second, third))


@triton.jit
def widen_rows(
    Y, U, B, KEPT, rows, y_stride, u_stride, start0, start1, start2, size0, size1, size2, scale0, scale1, scale2,
    RANK: tl.constexpr, KEEPS: tl.constexpr, PRECISE: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Y[:, start : start + size] += scale U' B', for the columns of one pair; U may be kept without gaps."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    block, pair = tl.program_id(1), tl.program_id(2)
    start, size = pick(pair, start0, start1, start2), pick(pair, size0, size1, size2)
    above = pick(pair, 0, size0, size0 + size1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < rows, column < size
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.static_range(0, RANK, DEPTH):
        k = step + tl.arange(0, DEPTH)
        there = real_row[:, None] & (k < RANK)[None, :]
        u = tl.load(U + row[:, None] * u_stride + (pair * RANK + k)[None, :], mask=there, other=0.0)
        b = tl.load(
            B + (above + column)[None, :] * RANK + k[:, None],
            mask=real_column[None, :] & (k < RANK)[:, None],
            other=0.0,
        )
        total = tl.dot(u, b, total, input_precision="ieee" if PRECISE else "tf32")
        if KEEPS:
            kept = KEPT + row[:, None] * (tl.num_programs(2) * RANK) + (pair * RANK + k)[None, :]
            tl.store(kept, u, mask=there & (block == 0))
    at = Y + row[:, None] * y_stride + (start + column)[None, :]
    inside = real_row[:, None] & real_column[None, :]
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32) + total * pick(pair, scale0, scale1, scale2)
    tl.store(at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def narrow_rows(
    DY, B, DU, rows, y_stride, u_stride, start0, start1, start2, size0, size1, size2, scale0, scale1, scale2,
    RANK: tl.constexpr, PRECISE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """DU = scale DY[:, start : start + size] B, for one pair."""
    pair = tl.program_id(1)
    start, size = pick(pair, start0, start1, start2), pick(pair, size0, size1, size2)
    above = pick(pair, 0, size0, size0 + size1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k, real_row = tl.arange(0, WIDE), row < rows
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for step in range(0, size, DEPTH):
        column = step + tl.arange(0, DEPTH)
        dy = tl.load(
            DY + row[:, None] * y_stride + (start + column)[None, :],
            mask=real_row[:, None] & (column < size)[None, :],
            other=0.0,
        )
        b = tl.load(
            B + (above + column)[:, None] * RANK + k[None, :], mask=(column < size)[:, None] & (k < RANK)[None, :],
            other=0.0,
        )  # fmt: skip
        total = tl.dot(dy, b, total, input_precision="ieee" if PRECISE else "tf32")
    at = DU + row[:, None] * u_stride + (pair * RANK + k)[None, :]
    du = (total * pick(pair, scale0, scale1, scale2)).to(DU.dtype.element_ty)
    tl.store(at, du, mask=real_row[:, None] & (k < RANK)[None, :])


def widen(
    y: Tensor, u: Tensor, b: Tensor, columns: Sequence[slice], scales: Sequence[float], keeps: bool
) -> Tensor | None:
    """Adds ``scale u B'`` to the columns of each pair in ``y [T, N]``, which are rounded once; returns a copy of
    ``u [T, ranks]`` if `keeps`. Rows of both may have other numbers between them."""
    rank, soon = b.shape[1], early(y.device)
    kept = u.new_empty(u.shape) if keeps else None
    if len(y):
        blocks = triton.cdiv(max(span.stop - span.start for span in columns), COLUMNS)
        widen_rows[(triton.cdiv(len(y), ROWS), blocks, len(columns))](
            y, u, b, u if kept is None else kept, len(y), y.stride(0), u.stride(0), *of_each(columns, scales), rank,
            keeps, y.dtype == torch.float32, bool(soon), ROWS, COLUMNS, min(DEPTH, wide(rank)), num_warps=4, **soon,
        )  # fmt: skip
    return kept


def narrow(dy: Tensor, b: Tensor, columns: Sequence[slice], scales: Sequence[float], out: Tensor) -> None:
    """Writes ``scale dy B`` of each pair to ``out [T, ranks]``."""
    rank = b.shape[1]
    narrow_rows[(triton.cdiv(len(dy), ROWS), len(columns))](
        dy, b, out, len(dy), dy.stride(0), out.stride(0), *of_each(columns, scales), rank, dy.dtype == torch.float32,
        ROWS, DEPTH, wide(rank), num_warps=4,
    )  # fmt: skip


def wide(rank: int) -> int:
    return max(LEAST, power_of_two(rank))


def of_each(columns: Sequence[slice], scales: Sequence[float]) -> list[float]:
    """The first column, the number of columns and the scale of each pair; zeros where there are fewer pairs."""
    none = [0] * (MOST - len(columns))
    starts, sizes = [span.start for span in columns], [span.stop - span.start for span in columns]
    return [*starts, *none, *sizes, *none, *scales, *map(float, none)]
