"""The draw of a token from logits, with its log-prob and all that the draw changes, one row a program; and the random
numbers that draws take."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paddock.core.rng import Stream, key_of
from paddock.kernels.arguments import Draws
from paddock.kernels.launch import power_of_two

BLOCK = 2048  # tokens of the vocabulary at a time
NUMBERS = 256  # random numbers of a program


@triton.jit
def draw_rows(
    LOGITS, NUMBERS, TOKENS, LOG_PROBS, TOKEN, DRAWN, DONE, LIMIT, STOPS, vocab_size, width, inverse_temperature, stops,
    GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOP_WIDE: tl.constexpr,
):  # fmt: skip
    """Sums of exp over blocks first, then inside the block where their running sum passes u x total."""
    row = tl.program_id(0).to(tl.int64)
    column, block = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    tops = tl.full((BLOCKS,), -float("inf"), tl.float32)
    peaks = tl.full((BLOCKS,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCKS,), tl.float32)
    highest, total = -3.4028234663852886e38, 0.0  # as in statistics.py, step by step: the log-prob is the trainer's
    for number in tl.range(0, tl.cdiv(vocab_size, BLOCK), num_stages=4):
        ids = number * BLOCK + column
        x = tl.load(LOGITS + row * vocab_size + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        x *= inverse_temperature
        top = tl.max(x, 0)
        risen = tl.maximum(highest, top)
        part = tl.sum(tl.exp(x - risen), 0)
        total = tl.exp(highest - risen) * total + part
        highest = risen
        here = block == number
        tops = tl.where(here, risen, tops)
        peaks = tl.where(here, top, peaks)
        sums = tl.where(here, part, sums)
    sums = tl.where(tops > -float("inf"), sums * tl.exp(tops - highest), 0.0)
    done, drawn = tl.load(DONE + row), tl.load(DRAWN + row)
    if GREEDY:
        chosen = tl.argmax(peaks, 0)
        ids = chosen * BLOCK + column
        x = tl.load(LOGITS + row * vocab_size + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        token = chosen * BLOCK + tl.argmax(x, 0)
    else:
        wide = sums.to(tl.float64)
        running = tl.cumsum(wide, 0)
        target = tl.load(NUMBERS + row * width + drawn) * tl.sum(wide, 0)
        chosen = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), tl.cdiv(vocab_size, BLOCK) - 1)
        before = tl.sum(tl.where(block == chosen, running - wide, 0.0), 0)
        share = tl.sum(tl.where(block == chosen, wide, 0.0), 0)
        ids = chosen * BLOCK + column
        x = tl.load(LOGITS + row * vocab_size + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        inside = tl.exp(x * inverse_temperature - highest).to(tl.float64)
        running = tl.cumsum(inside, 0)
        target = tl.minimum((target - before) / share, 1.0 - 1.1102230246251565e-16) * tl.sum(inside, 0)
        index = tl.sum((running <= target).to(tl.int32), 0)
        last = tl.max(tl.where(inside > 0, column, 0), 0)
        token = chosen * BLOCK + tl.minimum(index, last)
    token = tl.minimum(token, vocab_size - 1)
    # rounded by itself, as statistics.py stores it: a product could be fused with the difference, which rounds once
    x = tl.fma(tl.load(LOGITS + row * vocab_size + token).to(tl.float32), inverse_temperature, 0.0)
    tl.store(LOG_PROBS + row * width + drawn, x - (highest + tl.log(total)))
    tl.store(TOKENS + row * width + drawn, token.to(tl.int64))
    tl.store(TOKEN + row, token.to(tl.int64))
    stop = tl.arange(0, STOP_WIDE)
    ends = tl.load(STOPS + stop, mask=stop < stops, other=-1) == token
    drawn += tl.where(done, 0, 1)
    tl.store(DRAWN + row, drawn)
    tl.store(DONE + row, done | (tl.sum(ends.to(tl.int32), 0) > 0) | (drawn == tl.load(LIMIT + row)))


def draw(logits: Tensor, draws: Draws, temperature: float) -> None:
    """Draws a token for each row of ``logits [rows, vocab_size]``. Temperature 0: the likeliest, its log-prob at 1.

    What a finished row draws falls behind its last token, and is never read.
    """
    rows, vocab_size = logits.shape
    stops = len(draws.stops)
    draw_rows[(rows,)](
        logits, draws.numbers, draws.tokens, draws.log_probs, draws.token, draws.drawn, draws.done, draws.limit,
        draws.stops, vocab_size, draws.tokens.shape[1], 1.0 if temperature == 0.0 else 1.0 / temperature, stops,
        temperature == 0.0, BLOCK, power_of_two(triton.cdiv(vocab_size, BLOCK)), power_of_two(max(1, stops)),
        num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "stride", "rows"])  # they change from call to call: one compilation for all
def number_rows(OUT, COUNTERS, KEY, count, stride, rows, BLOCK: tl.constexpr):
    """Philox of (0, position, row, step), as core/rng.py computes it: the middle of one of 2^52 cells."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(COUNTERS + 2 * rows + row).to(tl.uint32)
    position = start + column.to(tl.uint32)
    name = tl.zeros_like(position) + tl.load(COUNTERS + row).to(tl.uint32)
    step = tl.zeros_like(position) + tl.load(COUNTERS + rows + row).to(tl.uint32)
    high, low, _, _ = tl.philox(tl.load(KEY), tl.zeros_like(position), position, name, step)
    cell = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    number = (cell.to(tl.float64) + 0.5) * 2.220446049250313e-16
    tl.store(OUT + row * stride + column, number, mask=column < count)


def fill_uniforms(out: Tensor, counters: Tensor, seed: int) -> None:
    """Fills ``out [rows, count]`` with uniform random numbers in one launch, bit for bit those of the rollout engines'
    `uniforms`, for which torch takes about 140: a turn of a conversation waits for them.

    ``counters [3, rows]``: rows, steps, starts.
    """
    low, high = key_of(seed, Stream.SAMPLE)
    key = high << 32 | low
    key_there = torch.tensor([key - (1 << 64) if key >> 63 else key]).to(out.device, non_blocking=True)
    rows, count = out.shape
    number_rows[(rows, triton.cdiv(count, NUMBERS))](
        out, counters, key_there, count, out.stride(0), rows, NUMBERS, num_warps=4
    )
