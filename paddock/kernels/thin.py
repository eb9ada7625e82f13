"""Products of few rows, as a decode step has them: too short for the vendor's to fill the device.

The depth is divided among programs as well, and their sums are added up where they are read, by the norm that follows:
no kernel in between. A gated MLP's activation is applied before the result is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paddock.core.device import shared_memory
from paddock.kernels.arguments import ACTIVATIONS
from paddock.kernels.gated import activation
from paddock.kernels.launch import early

ALIGNED = 64  # what columns and depths must be multiples of: nothing is masked but rows
MOST_ROWS, MOST_GATED_ROWS = 256, 64
MOST_BYTES = 1 << 24  # of a weight: reading a larger one takes longer than starting the ordinary product
LARGEST = 164 * 1024  # bytes of a multiprocessor's own memory that the largest program asks for
WARPS, STAGES = 4, 5  # stages of 16-bit numbers: float32 takes twice the memory


@triton.jit
def thin_rows(
    X, W, Y, rows, columns, depth, span, KIND: tl.constexpr, PRECISE: tl.constexpr, EARLY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Y [parts, rows, columns] = X [rows, depth] W' [columns, depth], over a span of the depth each."""
    if EARLY:
        gdc_wait()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, part = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2)
    k = part * span + tl.arange(0, DEPTH)
    x_at = X + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * depth + k[None, :]
    w_at = W + column.to(tl.int64)[None, :] * depth + k[:, None]
    total, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    how: tl.constexpr = "ieee" if PRECISE else "tf32"
    for start in range(0, span, DEPTH):
        x = tl.load(x_at + start)
        total = tl.dot(x, tl.load(w_at + start), total, input_precision=how)
        if KIND >= 0:
            up = tl.dot(x, tl.load(w_at + columns * depth + start), up, input_precision=how)
    if EARLY:
        gdc_launch_dependents()
    if KIND >= 0:
        value, _ = activation(total, KIND)
        total = value * up
    at = (part * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(Y + at, total.to(Y.dtype.element_ty), mask=(row < rows)[:, None])


def is_thin(x: Tensor, weight: Tensor) -> bool:
    """True if the product is better computed here."""
    fits = len(x) <= MOST_ROWS and weight.nbytes <= MOST_BYTES and weight.dtype == torch.bfloat16
    fits = fits and shared_memory(x.device) >= LARGEST
    return fits and weight.shape[0] % (2 * ALIGNED) == 0 and weight.shape[1] % ALIGNED == 0


def thin_parts(x: Tensor, weight: Tensor) -> Tensor:
    """``x [T, D] W'`` in float32 parts ``[parts, T, N]`` whose sum it is."""
    rows, (columns, depth) = len(x), weight.shape
    shape = tile(rows, depth)
    programs = columns // shape[1] * triton.cdiv(rows, shape[0])
    parts = 1
    while parts < 8 and programs * parts < 128 and depth % (2 * parts * shape[2]) == 0:
        parts *= 2
    y = x.new_empty(parts, rows, columns, dtype=torch.float32)
    launch(x, weight, y, -1, shape)
    return y


def thin_gated(x: Tensor, weight: Tensor, activation_name: str) -> Tensor:
    """``[T, D] -> [T, I]`` of an MLP whose projections of gate and value are one weight ``[2 I, D]``."""
    y = x.new_empty(len(x), len(weight) // 2)
    launch(x, weight, y[None], ACTIVATIONS[activation_name], tile(*x.shape))
    return y


def tile(rows: int, depth: int) -> tuple[int, int, int]:
    """Rows, columns and depth of one program's products: what was fastest on an H200."""
    if rows <= 32 or depth % 128:
        return (16 if rows <= 32 else 64), 64, 64
    return (64, 32, 128) if rows <= 128 else (128, 64, 64)


def launch(x: Tensor, weight: Tensor, y: Tensor, kind: int, shape: tuple[int, int, int]) -> None:
    parts, rows, columns = y.shape
    depth, soon = x.shape[1], early(x.device)
    stages = STAGES * 2 // x.element_size()
    thin_rows[(columns // shape[1], triton.cdiv(rows, shape[0]), parts)](
        x, weight, y, rows, columns, depth, depth // parts, kind, x.dtype == torch.float32, bool(soon), *shape,
        num_warps=WARPS, num_stages=stages, **soon,
    )  # fmt: skip
