"""A product whose every row is computed the same way, however many there are: the vendor's change with the shape."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 64, 128, 64
TILES = 8  # tiles of rows that share their columns' weights in cache


@triton.jit
def multiply(
    X, W, BIAS, Y, rows, columns, depth, BIASED: tl.constexpr, PRECISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Y [rows, columns] = X [rows, depth] W' [columns, depth] + bias, in order of depth."""
    program = tl.program_id(0)
    high, wide = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    band = program // (TILES * wide) * TILES
    height = tl.minimum(high - band, TILES)
    row = (band + program % (TILES * wide) % height) * ROWS + tl.arange(0, ROWS)
    column = program % (TILES * wide) // height * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < rows, column < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(
            X + row.to(tl.int64)[:, None] * depth + k[None, :], mask=real_row[:, None] & (k < depth)[None, :], other=0.0
        )
        w = tl.load(
            W + column.to(tl.int64)[None, :] * depth + k[:, None],
            mask=real_column[None, :] & (k < depth)[:, None],
            other=0.0,
        )
        total = tl.dot(x, w, total, input_precision="ieee" if PRECISE else "tf32")
    if BIASED:
        total += tl.load(BIAS + column, mask=real_column, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(Y + at, total.to(Y.dtype.element_ty), mask=real_row[:, None] & real_column[None, :])


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``x [T, D] W' + b``, summed in float32, in `dtype` or that of x."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, columns = len(x), len(weight)
    y = x.new_empty(rows, columns, dtype=dtype)
    if rows:
        programs = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
        multiply[(programs,)](
            x, weight, x if bias is None else bias, y, rows, columns, x.shape[1], bias is not None,
            x.dtype == torch.float32, ROWS, COLUMNS, DEPTH, TILES, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y
