"""KV cache with one row per token. A prompt is stored once and read by all its responses; rows never move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from paddock.core.device import can_record
from paddock.engines.rollout.base import Request
from paddock.engines.rollout.embedded.sequences import Extension, NewTokens
from paddock.kernels.arguments import Pieces
from paddock.kernels.launch import power_of_two
from paddock.models.attention.pool_attention import PoolDecode, PoolPrefill
from paddock.models.attention.shared_prompts import ranges

ALIGNED = 512  # bytes, of torch's own allocations


@dataclass(eq=False)
class SlotSpan:
    """Neighbouring rows that hold a prompt, and how many answers still read them."""

    start: int
    stop: int
    readers: int = 0


class Spans:
    """Tracks which rows of a stretch are free. Prompts come and go in blocks, so a list of gaps is enough."""

    def __init__(self, size: int):
        self.gaps = [(0, size)]

    def take(self, length: int) -> SlotSpan | None:
        for number, (start, stop) in enumerate(self.gaps):
            if stop - start >= length:
                self.gaps[number : number + 1] = [(start + length, stop)] if stop - start > length else []
                return SlotSpan(start, start + length)
        return None

    def give(self, span: SlotSpan) -> None:
        joined: list[tuple[int, int]] = []
        for start, stop in sorted([*self.gaps, (span.start, span.stop)]):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
        self.gaps = joined


LEAST = 32  # rows of an extension: fewer sizes, fewer graphs
SPARED = 2**26
"""Keys and values, in numbers, that all responses in flight must be spared to read in a layer of a step, for prompts to
be read once per group: a kernel more, and the state that it leaves for each response, take about as long as half of
them (one H200: benchmarks/decode_attention.py)."""


def worth_sharing(requests: Sequence[tuple[int, int]], at_once: int, numbers: int) -> bool:
    """True if decode attention should read a prompt once for its group; `requests`: tokens and responses of each, of
    which so many are in flight at a time; `numbers`: of a token's keys and values in a layer."""
    spared = numbers * sum(tokens * (rows - 1) for tokens, rows in requests)
    return spared * at_once >= SPARED * sum(rows for _, rows in requests)


def numbers_of_a_token(config: PretrainedConfig) -> int:
    """Returns how many numbers the keys and values of a token have in a layer."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


class TokenPool:
    """Buffers ``[tokens, kv_heads, head_dim]`` a layer, made at first use: prompts, then a stretch for each answer.

    Between two uses others may have their memory (`drop`, `restore`). Then all of them are parts of one stretch, which
    torch's allocator gives out again at the same address if it can: what was recorded over them holds.

    Three numbers on the device tell where a live sequence's tokens are, and `held` on the host what to free.

    `shares` (see `PoolBuffers`) is set for each session, and is part of the key of its graphs.
    """

    def __init__(self, count: int, prompt_tokens: int, answer_tokens: int, device: torch.device):
        self.count, self.prompt_tokens, self.answer_tokens = count, prompt_tokens, answer_tokens
        self.scratch = prompt_tokens + count * answer_tokens  # where rows write that stand for nothing
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.shapes: list[tuple[dict[int, Tensor], int, torch.Size, torch.dtype]] = []
        self.prompt, self.prompt_length, self.answer = torch.zeros(3, count, dtype=torch.int32, device=device)
        self.extensions: dict[int, Tensor] = {}
        self.shares = False
        self.begin()

    def begin(self) -> None:
        """Forgets all sequences; every row of the columns stands for nothing."""
        self.spans = Spans(self.prompt_tokens)
        self.free = list(range(self.count))
        self.held: list[tuple[SlotSpan, int]] = []
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
        where = [self.where(*held) for held in self.held[start:]]
        if where:
            rows = torch.tensor(where, dtype=torch.int32).t().to(self.prompt.device, non_blocking=True)
            for column, values in zip((self.prompt, self.prompt_length, self.answer), rows, strict=True):
                column[start : len(self.held)] = values

    def where(self, span: SlotSpan, slot: int) -> tuple[int, int, int]:
        """Returns a sequence's prompt, its length, and its answer, as the columns have them."""
        return span.start, span.stop - span.start, self.prompt_tokens + slot * self.answer_tokens

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.give(self.held[row])

    def give(self, held: tuple[SlotSpan, int]) -> None:
        span, slot = held
        self.free.append(slot)
        span.readers -= 1
        if span.readers == 0:
            self.spans.give(span)

    def park(self, row: int, tokens: int) -> tuple[SlotSpan, int]:
        return self.held[row]

    def unpark(self, rows: range, held: Sequence[tuple[SlotSpan, int]]) -> None:
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

    def extend(self, new: Sequence[NewTokens]) -> Extension | None:
        """Writes new tokens, their positions, and where the tokens before them are, to the device."""
        counts = [len(part.tokens) for part in new]
        total = sum(counts)
        if total == 0:
            return None
        columns = self.extension(total)
        values = np.zeros(columns.shape, np.int64)
        values[-1] = self.scratch  # the answer of rows that stand for nothing
        values[0, :total] = [token for part in new for token in part.tokens]
        values[1, :total] = ranges([part.held + part.offset for part in new], counts)
        values[2, :total] = ranges([part.held for part in new], counts)
        values[3:, :total] = np.repeat([self.where(*self.held[part.row]) for part in new], counts, axis=0).T
        columns.copy_(torch.from_numpy(values), non_blocking=True)
        return Extension(columns[0], columns[1], columns[2:])

    def extension(self, tokens: int) -> Tensor:
        """Returns columns for so many new tokens or more: token, position, tokens before it, and `where`. They stay
        where graphs read them."""
        device = self.prompt.device
        size = max(LEAST, power_of_two(tokens)) if can_record(device) else tokens
        if size not in self.extensions:
            self.extensions[size] = torch.zeros(6, size, dtype=torch.long, device=device)
        return self.extensions[size]

    def decode(self, lengths: Tensor, done: Tensor, beside: Extension | None = None) -> PoolDecode:
        if beside is None:
            return PoolDecode(self, lengths, done)
        before, prompt, prompt_length, answer = beside.where
        return PoolDecode(self, lengths, done, Pieces(prompt.int(), prompt_length.int(), answer.int(), before))


def rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
