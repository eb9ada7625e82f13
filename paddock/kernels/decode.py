"""Attention of one query a sequence over keys and values that lie in two pieces: its prompt's, shared, and its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paddock.core.device import multiprocessors
from paddock.kernels.arguments import Pieces
from paddock.kernels.launch import early, power_of_two

MIN_ROWS = 16  # of a tensor core's product
BLOCK = 64  # keys at a time
WARPS, STAGES = 4, 3
QUERIES = 64  # of an exact product
MAX_SPLITS = 16


@triton.jit
def absorb(q, k, v, seen, top, total, out, scale, softcap, CAPPED: tl.constexpr, PRECISE: tl.constexpr):
    """Adds one block of keys and values to the running maximum, sum and output of the queries (online softmax)."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee" if PRECISE else "tf32") * scale
    if CAPPED:
        score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
    score = tl.where(seen, score * 1.4426950408889634, -1e30)
    risen = tl.maximum(top, tl.max(score, 1))
    p = tl.exp2(score - risen[:, None])
    shrink = tl.exp2(top - risen)
    out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee" if PRECISE else "tf32")
    return risen, total * shrink + tl.sum(p, 1), out


@triton.jit
def attend_rows(
    Q, K, V, OUT, TOP, TOTAL, PROMPT, PROMPT_LENGTH, ANSWER, LENGTH, SINKS, scale, softcap, window, keys,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, PRECISE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The queries of one sequence that share a key head, over one split of its tokens.

    Heads of a sequence are neighbours in memory, and so are their programs in time.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, prompt_length = tl.load(PROMPT + row).to(tl.int64), tl.load(PROMPT_LENGTH + row)
    answer, end = tl.load(ANSWER + row).to(tl.int64), tl.load(LENGTH + row) + 1
    column, query = tl.arange(0, WIDE), tl.arange(0, ROWS)
    real = (query < GROUP)[:, None] & (column < D)[None, :]
    at = (row * keys + head) * GROUP * D + query[:, None] * D + column[None, :]
    q = tl.load(Q + at, mask=real, other=0.0)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SUNK:  # a score without a value, in the first split
        sink = tl.load(SINKS + head * GROUP + query, mask=query < GROUP, other=0.0).to(tl.float32)
        top = tl.where(split == 0, sink * 1.4426950408889634, top)
        total = tl.where(split == 0, total + 1.0, total)
    out = tl.zeros((ROWS, WIDE), tl.float32)
    first = tl.maximum(0, end - window) // BLOCK * BLOCK if WINDOWED else 0
    span = tl.cdiv(tl.cdiv(end - first, BLOCK), SPLITS) * BLOCK
    low = first + split * span
    for place in range(low, tl.minimum(low + span, end), BLOCK):
        token = place + tl.arange(0, BLOCK)
        inside = token < end
        if WINDOWED:
            inside = inside & (token >= end - window)
        index = tl.where(token < prompt_length, start + token, answer + token - prompt_length)
        load = inside[:, None] & (column < D)[None, :]
        where = (index * keys + head)[:, None] * D + column[None, :]
        k = tl.load(K + where, mask=load, other=0.0)
        v = tl.load(V + where, mask=load, other=0.0)
        top, total, out = absorb(q, k, v, inside[None, :], top, total, out, scale, softcap, CAPPED, PRECISE)
    if SPLITS == 1:
        tl.store(OUT + at, (out / total[:, None]).to(OUT.dtype.element_ty), mask=real)
    else:
        part = (row * keys + head) * SPLITS + split
        rows = part * ROWS + query
        tl.store(OUT + rows[:, None] * D + column[None, :], out, mask=(column < D)[None, :])
        tl.store(TOP + rows, top)
        tl.store(TOTAL + rows, total)


@triton.jit
def join_splits(
    PARTS, TOP, TOTAL, OUT, keys, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, query = tl.arange(0, WIDE), tl.arange(0, ROWS)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDE), tl.float32)
    for split in range(SPLITS):
        rows = ((row * keys + head) * SPLITS + split) * ROWS + query
        part_top = tl.load(TOP + rows)
        risen = tl.maximum(top, part_top)
        shrink, weight = tl.exp2(top - risen), tl.exp2(part_top - risen)
        part = tl.load(PARTS + rows[:, None] * D + column[None, :], mask=(column < D)[None, :], other=0.0)
        out = out * shrink[:, None] + part * weight[:, None]
        total = total * shrink + tl.load(TOTAL + rows) * weight
        top = risen
    real = (query < GROUP)[:, None] & (column < D)[None, :]
    at = (row * keys + head) * GROUP * D + query[:, None] * D + column[None, :]
    tl.store(OUT + at, (out / total[:, None]).to(OUT.dtype.element_ty), mask=real)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pieces: Pieces,
    scale: float,
    window: int | None,
    softcap: float | None,
    exact: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """``q [rows, H, D]`` over ``keys, values [tokens, K, D]``; returns ``[rows, H, D]``. Nothing waits for the device.
    ``sinks [H]``: see models/attention/sinks.py.

    `exact`: with the very products of `packed.packed_attention`, so that a query's result is the same, bit by bit.
    """
    rows, heads, dim = q.shape
    shared = keys.shape[1]
    group = heads // shared
    block_rows, wide = max(QUERIES if exact else MIN_ROWS, power_of_two(group)), max(16, power_of_two(dim))
    splits = 1 if exact else splits_of(rows * shared, q.device)
    out, soon = torch.empty_like(q), early(q.device)
    if splits == 1:
        parts, top, total = out, out, out
    else:
        parts = q.new_empty(rows, shared, splits, block_rows, dim, dtype=torch.float32)
        top, total = q.new_empty(2, rows, shared, splits, block_rows, dtype=torch.float32)
    attend_rows[(shared, rows, splits)](
        q, keys, values, parts, top, total, pieces.prompt, pieces.prompt_length, pieces.answer, pieces.length,
        q if sinks is None else sinks, scale, softcap or 1.0, window or 0, shared, group, block_rows, dim, wide, BLOCK,
        splits, window is not None, softcap is not None, sinks is not None, q.dtype == torch.float32, bool(soon),
        num_warps=WARPS, num_stages=STAGES, **soon,
    )  # fmt: skip
    if splits > 1:
        join_splits[(shared, rows)](
            parts, top, total, out, shared, group, block_rows, dim, wide, splits, bool(soon), num_warps=4, **soon
        )
    return out


def splits_of(programs: int, device: torch.device) -> int:
    """A power of two that fills the device with about four programs a multiprocessor, where sequences are few."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits < 2 * multiprocessors(device):
        splits *= 2
    return splits
