"""Keys and values as kernels read them, a token a row: a prompt's lie there once for its answers. None ever moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from paddock.engines.rollout.embedded.request import Request
from paddock.kernels.arguments import Pieces
from paddock.kernels.choice import kernels_for
from paddock.models.attention import Packed

ALIGNED = 512  # bytes, of torch's own allocations


@dataclass(eq=False)
class Span:
    """Neighbouring rows that hold a prompt, and how many answers still read them."""

    start: int
    stop: int
    readers: int = 0


class Spans:
    """Which rows of a stretch are free. Prompts come and go in blocks, so a list of gaps is enough."""

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
        """Nothing is held; every row of the columns stands for nothing."""
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
        """Keys and values are gone, but not what they looked like."""
        for buffers in (self.keys, self.values):
            self.shapes += [(buffers, index, buffer.shape, buffer.dtype) for index, buffer in buffers.items()]
            buffers.clear()

    def restore(self) -> int:
        """Room for what was dropped, and its address."""
        sizes = [rounded(shape.numel() * dtype.itemsize) for _, _, shape, dtype in self.shapes]
        whole = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.prompt.device)
        for (buffers, index, shape, dtype), part in zip(self.shapes, whole.split(sizes), strict=True):
            buffers[index] = part.view(dtype)[: shape.numel()].view(shape)
        self.shapes = []
        return whole.data_ptr()

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.keys.values(), *self.values.values()))

    def admit(self, requests: Sequence[Request]) -> int:
        """Room for as many of the requests as prompts find some; returns how many."""
        start, columns = len(self.held), []
        taken = 0
        for request in requests:
            span = self.spans.take(len(request.tokens))
            if span is None:
                break
            span.readers = len(request.rows)
            taken += 1
            for _ in request.rows:
                slot = self.free.pop()
                self.held.append((span, slot))
                columns.append((span.start, len(request.tokens), self.prompt_tokens + slot * self.answer_tokens))
        if columns:
            found = torch.tensor(columns, dtype=torch.int32).t().to(self.prompt.device, non_blocking=True)
            for column, values in zip((self.prompt, self.prompt_length, self.answer), found, strict=True):
                column[start : len(self.held)] = values
        return taken

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            span, slot = self.held[row]
            self.free.append(slot)
            span.readers -= 1
            if span.readers == 0:
                self.spans.give(span)

    def move(self, sources: Tensor, targets: Tensor, movers: Sequence[int], holes: Sequence[int], held: Tensor) -> None:
        for column in (self.prompt, self.prompt_length, self.answer):
            column[targets] = column[sources]
        for mover, hole in zip(movers, holes, strict=True):
            self.held[hole] = self.held[mover]

    def shrink(self, left: int) -> None:
        """The sequences behind the first `left` are gone."""
        self.blank(left, len(self.held))
        del self.held[left:]

    def prefill(self, lengths: Sequence[int], targets: Sequence[range], device: torch.device) -> PoolPrefill:
        spans = [self.held[target.start][0] for target in targets]
        return PoolPrefill(self, lengths, [span.start for span in spans], device)

    def decode(self, lengths: Tensor, done: Tensor) -> PoolDecode:
        return PoolDecode(self, lengths, done)


class PoolPrefill(Packed):
    """Prompts end to end, each attending to itself; keys and values are kept."""

    def __init__(self, pool: TokenPool, lengths: Sequence[int], starts: Sequence[int], device: torch.device):
        super().__init__(lengths, device)
        self.pool = pool
        places = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
        self.places = places.to(device, non_blocking=True)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        index, stored = int(module.layer_idx), alike(key, value)  # type: ignore[arg-type]
        buffers = self.pool.layer(index, key.shape[1], stored[0].shape[3], stored[1].shape[3], key)
        for buffer, stream in zip(buffers, stored, strict=True):
            buffer.index_copy_(0, self.places, stream[0, :, : len(self.places)].transpose(0, 1).to(buffer.dtype))
        return super().attend(module, query, key, value, scaling, window, softcap, sinks)


class PoolDecode:
    """One query for each of the first sequences: over its prompt, its answer so far, and itself."""

    def __init__(self, pool: TokenPool, lengths: Tensor, done: Tensor):
        self.pool, rows = pool, len(lengths)
        prompt, prompt_length, answer = pool.prompt[:rows], pool.prompt_length[:rows], pool.answer[:rows]
        self.pieces = Pieces(prompt, prompt_length, answer, lengths.masked_fill(done, 0))
        self.place = answer + lengths - prompt_length

    def buffers(self, layer: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self.pool.layer(layer, heads, dim, dim, like), self.place

    def attend_stored(
        self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None, exact: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return kernels_for(query).decode_attention(
            query, self.pool.keys[layer], self.pool.values[layer], self.pieces, scaling, window, softcap, exact, sinks
        )

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """For modules that make keys and values themselves: ``[rows, heads, 1, dim]``."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        asked, stored, wide = alike(query, value)[0], alike(key, value), value.shape[3]
        buffers = self.pool.layer(index, key.shape[1], stored[0].shape[3], stored[1].shape[3], key)
        for buffer, new in zip(buffers, stored, strict=True):
            buffer.index_copy_(0, self.place, new[:, :, 0].to(buffer.dtype))
        found = self.attend_stored(index, asked[:, :, 0].contiguous(), scaling, window, softcap, sinks=sinks)
        return found[:, None, :, :wide]


def rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def alike(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Of one width, as kernels read them: zeros behind the narrower, which add nothing to a score or are cut off."""
    missing = key.shape[3] - value.shape[3]
    return pad(key, (0, max(0, -missing))), pad(value, (0, max(0, missing)))
