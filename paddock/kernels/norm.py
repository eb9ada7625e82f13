"""RMS norm with the residual sum before it, in one pass over memory each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paddock.kernels.launch import early, filling, power_of_two


@triton.jit
def norm_rows(
    X, BRANCH, WEIGHT, Y, SUM, SCALE, rows, columns, stride, branch_stride, eps,
    PARTS: tl.constexpr, UNIT: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """SUM = X + BRANCH, Y = SUM / rms(SUM) * weight; rounded when stored, not before."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    inside = column < columns
    x = tl.load(X + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        branch = tl.load(BRANCH + row * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            branch += tl.load(BRANCH + (part * rows + row) * branch_stride + column, mask=inside, other=0.0)
        total = (x + branch).to(SUM.dtype.element_ty)
        tl.store(SUM + row * columns + column, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    y = x * scale * (1.0 + weight if UNIT else weight)
    tl.store(Y + row * columns + column, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(SCALE + row, scale)


@triton.jit
def norm_rows_backward(
    DY, DSUM, X, WEIGHT, SCALE, DX, DBRANCH, DWEIGHT, rows, columns, stride,
    ADDS: tl.constexpr, TWO: tl.constexpr, UNIT: tl.constexpr, WEIGHS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dx = (w dy - x^ mean(w dy x^)) / rms + dsum, with x^ = x / rms; dweight = sum over rows of dy x^, in parts."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDE)
    weight = tl.load(WEIGHT + column, mask=column < columns, other=0.0).to(tl.float32)
    if UNIT:
        weight += 1.0
    by_weight = tl.zeros((WIDE,), tl.float32)
    for turn in range(0, tl.cdiv(rows, tl.num_programs(0))):
        row = (turn * tl.num_programs(0) + program).to(tl.int64)
        at, inside = row * columns + column, (column < columns) & (row < rows)
        scale = tl.load(SCALE + row, mask=row < rows, other=0.0)
        x = tl.load(X + row * stride + column, mask=inside, other=0.0).to(tl.float32) * scale
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHS:
            by_weight += dy * x
        dy *= weight
        dx = (dy - x * (tl.sum(dy * x, 0) / columns)) * scale
        if ADDS:
            dx += tl.load(DSUM + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if TWO:
            tl.store(DBRANCH + at, dx.to(DBRANCH.dtype.element_ty), mask=inside)
    if WEIGHS:
        tl.store(DWEIGHT + program * columns + column, by_weight, mask=column < columns)


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, unit: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``norm(x + branch) * weight`` in `dtype`, ``x + branch`` in the type of x, and 1 / rms of each row ``[T, D]``.

    `unit`: the weight is kept as its difference from 1, as in Gemma. A branch may come in parts ``[parts, T, D]`` that
    are yet to be added up (see thin.py). Rows of x, and of a branch in one part, may have gaps between them.
    """
    rows, columns = x.shape
    parts, soon = 0 if branch is None else len(branch) if branch.dim() == 3 else 1, early(x.device)
    y, scale = torch.empty_like(x, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    total = x if branch is None else torch.empty_like(x)
    if rows:
        norm_rows[(rows,)](
            x, x if branch is None else branch, weight, y, total, scale, rows, columns, x.stride(0),
            0 if branch is None else branch.stride(-2), eps, parts, unit, bool(soon), power_of_two(columns),
            num_warps=4 if columns <= 4096 else 8, **soon,
        )  # fmt: skip
    return y, total, scale


def add_norm_backward(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor, unit: bool, branch_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, of the branch (the same, in its type) and of the weight if it is trained."""
    rows, columns = total.shape
    programs, weighs = min(rows, filling(total.device)), weight.requires_grad
    dx = torch.empty_like(total)
    two = branch_dtype != total.dtype
    dbranch = torch.empty_like(total, dtype=branch_dtype) if two else dx
    parts = torch.empty(programs if weighs else 0, columns, dtype=torch.float32, device=total.device)
    norm_rows_backward[(programs,)](
        dy, dy if dsum is None else dsum, total, weight, scale, dx, dbranch, parts, rows, columns, total.stride(0),
        dsum is not None, two, unit, weighs, power_of_two(columns), num_warps=4 if columns <= 4096 else 8,
    )  # fmt: skip
    return dx, dbranch, parts.sum(0).to(weight.dtype) if weighs else None
