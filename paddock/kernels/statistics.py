"""What `models/token_stats.py` does to a chunk of logits, each way in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paddock.kernels.arguments import is_odd

BLOCK = 2048


@triton.jit
def gather_rows(
    LOGITS, TOKENS, TOP, TOTAL, CHOSEN, WEIGHTED, SQUARED, columns, first, inverse_temperature,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    top, total = tl.load(TOP + row), tl.load(TOTAL + row)
    weighted = tl.load(WEIGHTED + row) if ENTROPY else 0.0
    squared = tl.load(SQUARED + row) if SQUARES else 0.0
    for start in range(0, columns, BLOCK):
        ids = start + column
        x = tl.load(LOGITS + row * columns + ids, mask=ids < columns, other=-float("inf")) * inverse_temperature
        risen = tl.maximum(top, tl.max(x, 0))
        shrink = tl.exp(top - risen)
        x -= risen
        e = tl.exp(x)
        if ENTROPY:
            weighted = shrink * (weighted + total * (top - risen)) + tl.sum(tl.where(e > 0, e * x, 0.0), 0)
        if SQUARES:
            squared = shrink * shrink * squared + tl.sum(e * e, 0)
        total = shrink * total + tl.sum(e, 0)
        top = risen
    token = tl.load(TOKENS + row) - first
    if (token >= 0) & (token < columns):
        tl.store(CHOSEN + row, tl.load(LOGITS + row * columns + token) * inverse_temperature)
    tl.store(TOP + row, top)
    tl.store(TOTAL + row, total)
    if ENTROPY:
        tl.store(WEIGHTED + row, weighted)
    if SQUARES:
        tl.store(SQUARED + row, squared)


gather_odd_rows = triton.jit(gather_rows.fn, do_not_specialize=["columns"])
"""Sums each block as `draw_rows` does for a vocabulary that no 16 divides: threads have single numbers, not four."""


@triton.jit
def gradient_rows(
    LOGITS, TOKENS, NORMALISER, ENTROPY, OUTER, SLOPE, DLOGITS, columns, first, inverse_temperature, bend,
    SLOPED: tl.constexpr, BENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """outer ([v = y] - pi) - slope pi (log pi + H), times 1 - (z / cap)^2 where logits are capped."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < columns
    z = tl.load(LOGITS + row * columns + ids, mask=inside, other=0.0) * inverse_temperature
    log_pi = z - tl.load(NORMALISER + row)
    outer = tl.load(OUTER + row)
    factor = outer
    if SLOPED:
        factor += tl.load(SLOPE + row) * (log_pi + tl.load(ENTROPY + row))
    dz = tl.where(ids == tl.load(TOKENS + row) - first, outer, 0.0) - tl.exp(log_pi) * factor
    if BENT:
        dz *= 1.0 - (z * bend) * (z * bend)
    tl.store(DLOGITS + row * columns + ids, dz.to(DLOGITS.dtype.element_ty), mask=inside)


@triton.jit
def normalise_rows(TOP, TOTAL, OUT, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    total = tl.load(TOTAL + row, mask=inside, other=1.0)
    tl.store(OUT + row, tl.load(TOP + row, mask=inside, other=0.0) + tl.log(total), mask=inside)


def normalise(top: Tensor, total: Tensor) -> Tensor:
    """``top + log(total)`` with the logarithm that a draw takes (see sampling.py)."""
    out = torch.empty_like(top)
    normalise_rows[(triton.cdiv(len(top), BLOCK),)](top, total, out, len(top), BLOCK)
    return out


def gather(
    logits: Tensor, tokens: Tensor, first: int, temperature: float, top: Tensor, total: Tensor, chosen: Tensor,
    weighted: Tensor | None, squared: Tensor | None, odd: bool = False,
) -> None:  # fmt: skip
    """Adds a chunk ``[N, columns]`` of the vocabulary from token `first` on to the running numbers of each row; `odd`:
    the number of all its tokens is no multiple of 16."""
    rows, columns = logits.shape
    (gather_odd_rows if odd else gather_rows)[(rows,)](
        logits, tokens, top, total, chosen, top if weighted is None else weighted, top if squared is None else squared,
        columns, first, 1.0 / temperature, weighted is not None, squared is not None, BLOCK, num_warps=8,
    )  # fmt: skip


def log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs of one token a row, step by step as a trainer computes them (exact numerics). Temperature 0: at 1."""
    logits, (total, chosen) = logits.float().contiguous(), torch.zeros(2, len(logits), device=logits.device)
    top = torch.full_like(total, torch.finfo(torch.float32).min)
    gather(logits, tokens, 0, temperature or 1.0, top, total, chosen, None, None, is_odd(logits.shape[1]))
    return chosen - normalise(top, total)


def gradient(
    logits: Tensor, tokens: Tensor, first: int, temperature: float, normaliser: Tensor, entropy: Tensor, outer: Tensor,
    slope: Tensor | None, softcap: float | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows, columns = logits.shape
    out = torch.empty(rows, columns, dtype=dtype, device=logits.device)
    gradient_rows[(rows, triton.cdiv(columns, BLOCK))](
        logits, tokens, normaliser, entropy, outer, outer if slope is None else slope, out, columns, first,
        1.0 / temperature, temperature / softcap if softcap else 0.0, slope is not None, softcap is not None, BLOCK,
        num_warps=8,
    )  # fmt: skip
    return out
