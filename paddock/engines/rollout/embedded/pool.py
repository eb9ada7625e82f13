"""KV cache with one row per token. A prompt is stored once and read by all its responses; rows never move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.engines.rollout.base import Request
from paddock.models.attention.pool_attention import PoolDecode, PoolPrefill
from paddock.models.attention.shared_prompts import ranges

ALIGNED = 512  # bytes, of torch's own allocations


@dataclass(eq=False)
class Span:
    """Neighbouring rows that hold a prompt, and how many answers still read them."""

    start: int
    stop: int
    readers: int = 0


class Spans:
    """Tracks which rows of a stretch are free. Prompts come and go in blocks, so a list of gaps is enough."""

    def __init__(self, size: int):
        self.gaps = [(0, size)]

    def take(self, length: int) -> Span | None:
        for number, (start, stop) in enumerate(self.gaps):
            if stop - start >= length:
                self.gaps[number : number + 1] = [(start + length, stop)] if stop - start > length else []
                return Span(start, start + length)
        return None

    def give(self, span: Span) -> None:
        joined: list[tuple[int, int]] = []
        for start, stop in sorted([*self.gaps, (span.start, span.stop)]):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        self.gaps = joined


class TokenPool:
    """Buffers ``[tokens, kv_heads, head_dim]`` a layer, made at first use: prompts, then a stretch for each answer.

    Between two uses others may have their memory (`drop`, `restore`). Then all of them are parts of one stretch, which
    torch's allocator gives out again at the same address if it can: what was recorded over them holds.

    Three numbers on the device tell where a live sequence's tokens are, and `held` on the host what to free.
    """

    def __init__(self, count: int, prompt_tokens: int, answer_tokens: int, device: torch.device):
        self.count, self.prompt_tokens, self.answer_tokens = count, prompt_tokens, answer_tokens
        self.scratch = prompt_tokens + count * answer_tokens  # where rows write that stand for nothing
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.shapes: list[tuple[dict[int, Tensor], int, torch.Size, torch.dtype]] = []
        self.prompt, self.prompt_length, self.answer = torch.zeros(3, count, dtype=torch.int32, device=device)
        self.begin()

    def begin(self) -> None:
        """Forgets all sequences; every row of the columns stands for nothing."""
        self.spans = Spans(self.prompt_tokens)
        self.free = list(range(self.count))
        self.held: list[tuple[Span, int]] = []
        self.blank(0, self.count)

    def blank(self, start: int, stop: int) -> None:
        self.prompt_length[start:stop] = 0
        self.answer[start:stop] = self.scratch

    def layer(self, index: int, heads: int, key_dim: int, value_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self.keys:
            for buffers, dim in ((self.keys, key_dim), (self.values, value_dim)):
                buffers[index] = torch.zeros(self.scratch + 1, heads, dim, dtype=like.dtype, device=like.device)
        return self.keys[index], self.values[index]

    def drop(self) -> None:
        """Frees keys and values, but remembers their shapes."""
        for buffers in (self.keys, self.values):
            self.shapes += [(buffers, index, buffer.shape, buffer.dtype) for index, buffer in buffers.items()]
            buffers.clear()

    def restore(self) -> int:
        """Allocates what was dropped, and returns its address."""
        sizes = [rounded(shape.numel() * dtype.itemsize) for _, _, shape, dtype in self.shapes]
        whole = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.prompt.device)
        for (buffers, index, shape, dtype), part in zip(self.shapes, whole.split(sizes), strict=True):
            buffers[index] = part.view(dtype)[: shape.numel()].view(shape)
        self.shapes = []
        return whole.data_ptr()

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.keys.values(), *self.values.values()))

    def admit(self, requests: Sequence[Request]) -> int:
        """Reserves rows for as many of the requests as fit; returns how many."""
        start, taken = len(self.held), 0
        for request in requests:
            span = self.spans.take(len(request.tokens))
            if span is None:
                break
            span.readers = len(request.rows)
            taken += 1
            self.held += [(span, self.free.pop()) for _ in request.rows]
        self.tell(start)
        return taken

    def tell(self, start: int) -> None:
        """Writes where the sequences from `start` on have their tokens to the columns that kernels read."""
        where = [
            (span.start, span.stop - span.start, self.prompt_tokens + slot * self.answer_tokens)
            for span, slot in self.held[start:]
        ]
        if where:
            found = torch.tensor(where, dtype=torch.int32).t().to(self.prompt.device, non_blocking=True)
            for column, values in zip((self.prompt, self.prompt_length, self.answer), found, strict=True):
                column[start : len(self.held)] = values

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.give(self.held[row])

    def give(self, held: tuple[Span, int]) -> None:
        span, slot = held
        self.free.append(slot)
        span.readers -= 1
        if span.readers == 0:
            self.spans.give(span)

    def park(self, row: int, tokens: int) -> tuple[Span, int]:
        return self.held[row]

    def unpark(self, rows: range, held: Sequence[tuple[Span, int]]) -> None:
        self.held += held
        self.tell(rows.start)

    def move(self, sources: Tensor, targets: Tensor, movers: Sequence[int], holes: Sequence[int], held: Tensor) -> None:
        for column in (self.prompt, self.prompt_length, self.answer):
            column[targets] = column[sources]
        for mover, hole in zip(movers, holes, strict=True):
            self.held[hole] = self.held[mover]

    def shrink(self, left: int) -> None:
        """Drops the sequences behind the first `left`."""
        self.blank(left, len(self.held))
        del self.held[left:]

    def prefill(self, lengths: Sequence[int], targets: Sequence[range], device: torch.device) -> PoolPrefill:
        spans = [self.held[target.start][0] for target in targets]
        return PoolPrefill(self, lengths, [span.start for span in spans], device)

    def decode(self, lengths: Tensor, done: Tensor) -> PoolDecode:
        return PoolDecode.of(self, lengths, done)

    def extend(self, rows: range, held: Sequence[int], counts: Sequence[int]) -> PoolDecode:
        """Each new token is a query of its own over the same stretch: the decode kernel attends to what is stored."""
        device = self.prompt.device
        which = torch.tensor(rows).repeat_interleave(torch.tensor(counts)).to(device, non_blocking=True)
        return PoolDecode(self, ranges(held, counts).to(device, non_blocking=True), which)


def rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
