"""Attention over a KV cache with one rectangle per sequence (`Slots`), by torch's own operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from paddock.kernels.arguments import Scores
from paddock.models.attention.choice import choose
from paddock.models.attention.interface import AttentionCall, layer_of
from paddock.models.attention.packed import Packed
from paddock.models.attention.padded import padded_attention

STEP = 8  # slots that always share a span
CALL = 512  # cost of a call, in positions of one slot that it could read in that time


class SlotBuffers(Protocol):
    """The part of a slot cache that attention reads and writes."""

    max_len: int

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values ``[slots, kv_heads, max_len, head_dim]`` of a layer, shaped after what it stores."""
        ...


class SlotPrefill(Packed):
    """Prompts end to end, each attending to itself; its keys and values go to every slot that will continue it."""

    def __init__(self, slots: SlotBuffers, lengths: Sequence[int], targets: Sequence[range], device: torch.device):
        super().__init__(lengths, device)
        self.slots = slots
        self.targets = targets

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        for buffer, stream in zip(self.slots.layer(layer_of(module), key, value), (key, value), strict=True):
            prompts = stream[0, :, : sum(self.lengths)].split(self.lengths, dim=1)
            for prompt, target in zip(prompts, self.targets, strict=True):
                buffer[target.start : target.stop, :, : prompt.shape[1]] = prompt
        return super().attend(module, query, key, value, scores)


class SlotDecode:
    """One query for each of the first slots: it attends to the tokens before it and to itself.

    Queries behind those are new tokens of some slots, several each, which stand before the slot's own one.
    """

    def __init__(self, slots: SlotBuffers, lengths: Tensor, beside: Sequence[tuple[int, int, int]] = ()):
        """`lengths [rows]`: tokens before each slot's own query; `beside`: slot, tokens before the new ones, and how
        many are new."""
        self.slots = slots
        self.lengths = lengths
        self.beside = beside
        self.spans = spans_of(lengths.tolist())
        self.indices: dict[int, Tensor] = {}
        self.masks: dict[tuple[SlotRange, int | None], Tensor] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Takes ``[queries, heads, 1, dim]``, returns ``[queries, 1, heads, dim]``."""
        keys, values = self.slots.layer(layer_of(module), key, value)
        self.write(keys, key)
        self.write(values, value)
        query = query.to(keys.dtype)
        plain = choose("slots", AttentionCall(query, keys, values, scores, keys.shape[2])) == "sdpa"
        parts = []
        for span in self.spans:
            rows, seen = slice(span.start, span.stop), slice(span.first(scores.window), span.longest + 1)
            q, k, v, mask = query[rows], keys[rows, :, seen], values[rows, :, seen], self.mask(span, scores.window)
            parts.append((one_query if plain else padded_attention)(q, k, v, mask, scores))
        for (row, held, count), new in self.behind():
            k, v = (buffer[row : row + 1, :, : held + count] for buffer in (keys, values))
            mask = seen_by(held, held + count, scores.window, query.device)
            q = query[new, :, 0].transpose(0, 1)[None]
            parts.append((many_queries if plain else padded_attention)(q, k, v, mask, scores)[0][:, None])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def behind(self) -> Iterator[tuple[tuple[int, int, int], slice]]:
        """Yields the new tokens of a slot, and which of the queries they are."""
        start = len(self.lengths)
        for part in self.beside:
            yield part, slice(start, start + part[2])
            start += part[2]

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """``new [queries, heads, 1, dim]`` goes behind what the slots hold."""
        heads, dim, rows = buffer.shape[1], buffer.shape[3], len(self.lengths)
        if heads not in self.indices:
            slot, head = (torch.arange(n, device=new.device) for n in (rows, heads))
            start = (slot[:, None] * heads + head) * self.slots.max_len
            self.indices[heads] = (start + self.lengths[:, None]).flatten()
        buffer.view(-1, dim).index_copy_(0, self.indices[heads], new[:rows].reshape(-1, dim).to(buffer.dtype))
        for (row, held, count), part in self.behind():
            buffer[row, :, held : held + count] = new[part, :, 0].transpose(0, 1)

    def mask(self, span: SlotRange, window: int | None) -> Tensor:
        """[rows, 1, 1, positions] True where a key is seen; the same in all layers of a kind."""
        if (span, window) not in self.masks:
            position = torch.arange(span.first(window), span.longest + 1, device=self.lengths.device)
            own = self.lengths[span.start : span.stop, None]
            seen = position <= own if window is None else (position <= own) & (position > own - window)
            self.masks[span, window] = seen[:, None, None]
        return self.masks[span, window]


def seen_by(start: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] True where a query at ``start .. end - 1`` sees a key at ``0 .. end - 1``."""
    key, query = torch.arange(end, device=device), torch.arange(start, end, device=device)[:, None]
    return key <= query if window is None else (key <= query) & (key > query - window)


def one_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """``query [N, H, 1, D]`` over ``key, value [N, K, L, D]``; returns ``[N, 1, H, Dv]``."""
    count, heads, _, dim = query.shape
    if query.dtype == torch.float32:  # queries that share their keys in one product: faster, though not in bf16
        query = query.reshape(count, key.shape[1], -1, dim)
    gqa = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scaling, enable_gqa=gqa)
    return out.reshape(count, 1, heads, -1)


def many_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """``query [N, H, Q, D]`` over ``key, value [N, K, L, D]``; returns ``[N, Q, H, Dv]``."""
    gqa = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scaling, enable_gqa=gqa)
    return out.transpose(1, 2)


@dataclass(frozen=True)
class SlotRange:
    """Neighbouring slots that are read together, up to the longest of them."""

    start: int
    stop: int
    shortest: int
    longest: int

    @property
    def cost(self) -> int:
        return CALL + (self.stop - self.start) * self.longest

    def first(self, window: int | None) -> int:
        """Returns the first position that a query of these slots sees."""
        return 0 if window is None else max(0, self.shortest - window + 1)

    def joined(self, other: SlotRange) -> SlotRange:
        return SlotRange(self.start, other.stop, min(self.shortest, other.shortest), max(self.longest, other.longest))


def spans_of(lengths: list[int]) -> list[SlotRange]:
    """Joins neighbours as long as reading them together costs less than another call."""
    spans: list[SlotRange] = []
    for start in range(0, len(lengths), STEP):
        part = lengths[start : start + STEP]
        span = SlotRange(start, start + len(part), min(part), max(part))
        while spans and (joined := spans[-1].joined(span)).cost <= spans[-1].cost + span.cost:
            span = joined
            spans.pop()
        spans.append(span)
    return spans
