"""Attention of one query a sequence over keys and values that lie in two pieces: its prompt's, shared, and its own.

Where rows are grouped by their prompts (`rows_by_prompt`), one kernel reads each prompt once for a tile of its answers
and leaves the state of their softmax, from which another goes on over the answers' own tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paddock.core.device import multiprocessors, shared_memory
from paddock.kernels.arguments import Pieces, Scores
from paddock.kernels.launch import early, power_of_two

MIN_ROWS = 16  # of a tensor core's product
BLOCK = 64  # keys at a time
WARPS, STAGES = 4, 3
QUERIES = 64  # of an exact product, and of a tile of rows that share a prompt
MAX_SPLITS = 16
LEAST = 256  # tokens of a part of a prompt: the state that each part leaves is written and read for every row
COUNTED = 64  # rows that are compared at a time


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
def merge(top, total, out, part_top, part_total, part):
    """Adds a part of the tokens, by its own maximum, sum and output, to those of the queries."""
    risen = tl.maximum(top, part_top)
    shrink, weight = tl.exp2(top - risen), tl.exp2(part_top - risen)
    return risen, total * shrink + part_total * weight, out * shrink[:, None] + part * weight[:, None]


@triton.jit
def merge_parts(
    top, total, out, STATE, STATE_TOP, STATE_TOTAL, base, count, GROUP: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds what `attend_prompts` left for each of `count` parts of a prompt, the first of them at `base`."""
    column, query = tl.arange(0, WIDE), tl.arange(0, ROWS)
    real = (query < GROUP)[:, None] & (column < D)[None, :]
    for number in range(count):
        state = base + number * GROUP + query
        part = tl.load(STATE + state[:, None] * D + column[None, :], mask=real, other=0.0)
        part_top = tl.load(STATE_TOP + state, mask=query < GROUP, other=-1e30)
        part_total = tl.load(STATE_TOTAL + state, mask=query < GROUP, other=1.0)
        top, total, out = merge(top, total, out, part_top, part_total, part)
    return top, total, out


@triton.jit
def order_rows(PROMPT, PROMPT_LENGTH, ORDER, FIRST, LAST, rows, COUNTED: tl.constexpr):
    """Counts the rows that come before a row, to find its place: no sort of few rows is faster."""
    row = tl.program_id(0) * COUNTED + tl.arange(0, COUNTED)
    real = row < rows
    prompt, length = tl.load(PROMPT + row, mask=real, other=0), tl.load(PROMPT_LENGTH + row, mask=real, other=0)
    first = tl.zeros((COUNTED,), tl.int32)
    earlier = tl.zeros((COUNTED,), tl.int32)
    equal = tl.zeros((COUNTED,), tl.int32)
    for place in range(0, rows, COUNTED):
        other = place + tl.arange(0, COUNTED)
        there = (other < rows)[None, :]
        other_prompt = tl.load(PROMPT + other, mask=other < rows, other=0)[None, :]
        other_length = tl.load(PROMPT_LENGTH + other, mask=other < rows, other=0)[None, :]
        alike = other_prompt == prompt[:, None]
        same = there & alike & (other_length == length[:, None])
        less = there & ((other_prompt < prompt[:, None]) | (alike & (other_length < length[:, None])))
        first += tl.sum(less.to(tl.int32), 1)
        earlier += tl.sum((same & (other[None, :] < row[:, None])).to(tl.int32), 1)
        equal += tl.sum(same.to(tl.int32), 1)
    tl.store(ORDER + first + earlier, row, mask=real)
    tl.store(FIRST + first + earlier, first, mask=real)
    tl.store(LAST + first + earlier, first + equal, mask=real)


@triton.jit
def part_of(prompt_length, BLOCK: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr):
    """Tokens of each part of a prompt."""
    return tl.maximum(LEAST, tl.cdiv(tl.cdiv(prompt_length, BLOCK), PARTS) * BLOCK)


@triton.jit
def attend_prompts(
    Q, K, V, OUT, TOP, TOTAL, ORDER, FIRST, LAST, PROMPT, PROMPT_LENGTH, LENGTH, scale, softcap, window, keys,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    LEAST: tl.constexpr, PARTS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The queries of a tile of rows with one prompt that share a key head, over one part of the prompt.

    Tiles are counted from the first row of each prompt; programs of rows that begin none have nothing to do. A row that
    sees no token of a part leaves a maximum of -1e30, by which `merge` takes nothing of its sum and output.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    head, place, part = tl.program_id(0) % keys, tl.program_id(0) // keys, tl.program_id(1)
    MEMBERS: tl.constexpr = ROWS // GROUP
    leader, first, last = tl.load(ORDER + place), tl.load(FIRST + place), tl.load(LAST + place)
    if (place - first) % MEMBERS == 0:
        column, query = tl.arange(0, WIDE), tl.arange(0, ROWS)
        member = query // GROUP
        real = (member < MEMBERS) & (place + member < last)
        row = tl.load(ORDER + place + member, mask=real, other=0).to(tl.int64)
        start, prompt_length = tl.load(PROMPT + leader).to(tl.int64), tl.load(PROMPT_LENGTH + leader)
        span = part_of(prompt_length, BLOCK, LEAST, PARTS)
        low, high = part * span, tl.minimum((part + 1) * span, prompt_length)
        if low < high:
            end = tl.load(LENGTH + row, mask=real, other=0).to(tl.int32) + 1
            at = (row * keys + head) * GROUP + query % GROUP
            whole = real[:, None] & (column < D)[None, :]
            q = tl.load(Q + at[:, None] * D + column[None, :], mask=whole, other=0.0)
            top = tl.full((ROWS,), -1e30, tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            out = tl.zeros((ROWS, WIDE), tl.float32)
            if WINDOWED:
                earliest = tl.min(tl.where(real, end, 2147483647), 0) - window
                low = tl.maximum(low, tl.maximum(earliest, 0) // BLOCK * BLOCK)
            for block in range(low, high, BLOCK):
                token = block + tl.arange(0, BLOCK)
                inside = token < high
                seen = inside[None, :] & (token[None, :] < end[:, None])
                if WINDOWED:
                    seen = seen & (token[None, :] >= end[:, None] - window)
                load = inside[:, None] & (column < D)[None, :]
                where = ((start + token) * keys + head)[:, None] * D + column[None, :]
                k = tl.load(K + where, mask=load, other=0.0)
                v = tl.load(V + where, mask=load, other=0.0)
                top, total, out = absorb(q, k, v, seen, top, total, out, scale, softcap, CAPPED, PRECISE)
            state = ((row * keys + head) * PARTS + part) * GROUP + query % GROUP
            tl.store(OUT + state[:, None] * D + column[None, :], out, mask=whole)
            tl.store(TOP + state, top, mask=real)
            tl.store(TOTAL + state, total, mask=real)


@triton.jit
def attend_rows(
    Q, K, V, OUT, TOP, TOTAL, PROMPT, PROMPT_LENGTH, ANSWER, LENGTH, SINKS, STATE, STATE_TOP, STATE_TOTAL,
    scale, softcap, window, keys, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr, PRECISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The queries of one sequence that share a key head, over one split of its tokens. With `PARTS` those are the
    answer's, and the first split adds what `attend_prompts` left for each part of the prompt. That kernel may still be
    running until then: it has begun, so what it waited for, queries, keys and values, is there.

    Heads of a sequence are neighbours in memory, and so are their programs in time.
    """
    if EARLY:
        if PARTS == 0:
            gdc_wait()
        gdc_launch_dependents()
    head, row, split = tl.program_id(0) % keys, (tl.program_id(0) // keys).to(tl.int64), tl.program_id(1)
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
    if PARTS > 0:
        first = tl.minimum(tl.maximum(first, prompt_length), end)
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
    if PARTS > 0:
        if EARLY:
            gdc_wait()
        count = tl.cdiv(prompt_length, part_of(prompt_length, BLOCK, LEAST, PARTS))
        count, base = tl.where(split == 0, count, 0), (row * keys + head) * PARTS * GROUP
        top, total, out = merge_parts(top, total, out, STATE, STATE_TOP, STATE_TOTAL, base, count, GROUP, ROWS, D, WIDE)
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
    head, row = tl.program_id(0) % keys, (tl.program_id(0) // keys).to(tl.int64)
    column, query = tl.arange(0, WIDE), tl.arange(0, ROWS)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDE), tl.float32)
    for split in range(SPLITS):
        rows = ((row * keys + head) * SPLITS + split) * ROWS + query
        part = tl.load(PARTS + rows[:, None] * D + column[None, :], mask=(column < D)[None, :], other=0.0)
        top, total, out = merge(top, total, out, tl.load(TOP + rows), tl.load(TOTAL + rows), part)
    real = (query < GROUP)[:, None] & (column < D)[None, :]
    at = (row * keys + head) * GROUP * D + query[:, None] * D + column[None, :]
    tl.store(OUT + at, (out / total[:, None]).to(OUT.dtype.element_ty), mask=real)


def rows_by_prompt(pieces: Pieces) -> Tensor:
    """Returns `Pieces.by_prompt` of these rows. Nothing waits for the device."""
    rows = len(pieces.prompt)
    found = torch.empty(3, rows, dtype=torch.int32, device=pieces.prompt.device)
    order_rows[(triton.cdiv(rows, COUNTED),)](
        pieces.prompt, pieces.prompt_length, *found.unbind(), rows, COUNTED, num_warps=WARPS
    )
    return found


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, pieces: Pieces, scores: Scores, exact: bool = False
) -> Tensor:
    """``q [rows, H, D]`` over ``keys, values [tokens, K, D]``; returns ``[rows, H, D]``. Nothing waits for the device.

    `exact`: with the very products of `packed.packed_attention`, so that a query's result is the same, bit by bit. Then
    no prompt is read for several rows at once.
    """
    rows, heads, dim = q.shape
    shared = keys.shape[1]
    group = heads // shared
    block_rows, wide = max(QUERIES if exact else MIN_ROWS, power_of_two(group)), max(16, power_of_two(dim))
    splits = 1 if exact else splits_of(rows * shared, q.device, 2)
    out, soon = torch.empty_like(q), early(q.device)
    how = scores.scaling, scores.softcap or 1.0, scores.window or 0, shared, group
    kind = scores.window is not None, scores.softcap is not None
    launch = {"num_warps": WARPS, "num_stages": stages_of(q, wide), **soon}
    parts, state = 0, (out, out, out)
    if pieces.by_prompt is not None and not exact:
        tile = tile_of(q, group)
        parts = splits_of(triton.cdiv(rows, tile // group) * shared, q.device, 1)
        state = states(q, rows, shared, parts, group, dim)
        attend_prompts[(shared * rows, parts)](
            q, keys, values, *state, *pieces.by_prompt.unbind(), pieces.prompt, pieces.prompt_length, pieces.length,
            *how, tile, dim, wide, BLOCK, LEAST, parts, *kind, q.dtype == torch.float32, bool(soon), **launch,
        )  # fmt: skip
    found = (out, out, out) if splits == 1 else states(q, rows, shared, splits, block_rows, dim)
    attend_rows[(shared * rows, splits)](
        q, keys, values, *found, pieces.prompt, pieces.prompt_length, pieces.answer, pieces.length,
        q if scores.sinks is None else scores.sinks, *state, *how, block_rows, dim, wide, BLOCK, splits, LEAST, parts,
        *kind, scores.sinks is not None, q.dtype == torch.float32, bool(soon), **launch,
    )  # fmt: skip
    if splits > 1:
        join_splits[(shared * rows,)](
            *found, out, shared, group, block_rows, dim, wide, splits, bool(soon), num_warps=4, **soon
        )
    return out


def tile_of(q: Tensor, group: int) -> int:
    """Returns the queries of a tile of rows that share a prompt: fewer where registers and shared memory are few."""
    fits = q.dtype != torch.float32 and q.shape[2] <= 128
    return max(QUERIES if fits else MIN_ROWS, power_of_two(group))


def stages_of(q: Tensor, wide: int) -> int:
    """Returns how many blocks of keys and values are prefetched at a time: fewer where shared memory has no room."""
    room = shared_memory(q.device)
    return min(STAGES, max(1, room // (2 * BLOCK * wide * q.element_size()))) if room else STAGES


def states(q: Tensor, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns room for outputs ``shape`` of parts of the tokens, and for their maxima and sums ``shape[:-1]``."""
    top, total = q.new_empty((2, *shape[:-1]), dtype=torch.float32)
    return q.new_empty(shape, dtype=torch.float32), top, total


def splits_of(programs: int, device: torch.device, each: int) -> int:
    """A power of two that fills the device with at least `each` programs a multiprocessor, where sequences are few."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits < each * multiprocessors(device):
        splits *= 2
    return splits
