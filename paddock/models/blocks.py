"""Attention of packed sequences in rectangular blocks, forward and backward, in plain matrix products.

Neighbouring sequences of similar length form a block ``[rows, length]``, padded at the right: with a causal mask no
query sees the padding behind it. Blocks of equal lengths are views. Only q, k and v are kept for backward, which forms
a block's probabilities again: on a CPU in bf16, that takes a third of the time of SDPA's own backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FULL = 0.8
"""The shortest sequence of a block has at least this share of its longest one's tokens."""
TILE = 128
"""Queries that are multiplied with their keys at a time: keys behind a tile's last query are skipped."""
MAX_SCORES = 1 << 18
"""Scores of one head that exist at a time: those of all heads stay in a CPU's cache."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some neighbouring sequences of the stream."""

    start: int
    end: int
    rows: int
    length: int
    slots: Tensor | None
    """Where each token of the stream stands in the flattened block; None: it fills the block in order."""
    prompt: slice | None = None
    """Tokens of the stream that all queries of the block see, before their own sequence."""

    @property
    def before(self) -> int:
        """Keys before those of a sequence's own."""
        return 0 if self.prompt is None else self.prompt.stop - self.prompt.start

    def pack(self, stream: Tensor) -> Tensor:
        """``[T, heads, dim] -> [rows, heads, length, dim]``, zeros behind each sequence's end."""
        part = stream[self.start : self.end]
        if self.slots is not None:
            part = part.new_zeros(self.rows * self.length, *part.shape[1:]).index_copy_(0, self.slots, part)
        return part.view(self.rows, self.length, *part.shape[1:]).transpose(1, 2)

    def pack_keys(self, stream: Tensor) -> Tensor:
        """The same of keys or values ``[rows, heads, before + length, dim]``."""
        own = self.pack(stream)
        if self.prompt is None:
            return own
        shared = stream[self.prompt].transpose(0, 1)
        return torch.cat([shared.expand(self.rows, *shared.shape), own], 2)

    def unpack(self, block: Tensor, stream: Tensor) -> None:
        """Writes a block ``[rows, heads, length, dim]`` to its place in the stream."""
        tokens = block.transpose(1, 2).reshape(self.rows * self.length, *stream.shape[1:])
        stream[self.start : self.end] = tokens if self.slots is None else tokens.index_select(0, self.slots)

    def add_keys(self, block: Tensor, stream: Tensor) -> None:
        """Gradients ``[rows, heads, before + length, dim]``: those of a shared prompt are added to what is there."""
        if self.prompt is not None:
            stream[self.prompt] += block[:, :, : self.before].sum(0).transpose(0, 1)
        self.unpack(block[:, :, self.before :], stream)


def blocks_of(lengths: Sequence[int], device: torch.device, start: int = 0, prompt: slice | None = None) -> list[Block]:
    """Cuts the stream from `start` on where lengths begin to differ much, or a block's scores would be too many."""
    blocks: list[Block] = []
    members: list[int] = []
    before = 0 if prompt is None else prompt.stop - prompt.start
    for length in lengths:
        longest, shortest = max([length, *members]), min([length, *members])
        too_many = (len(members) + 1) * min(longest, TILE) * (before + longest) > MAX_SCORES
        if members and (shortest < FULL * longest or too_many):
            blocks.append(block_of(start, members, device, prompt))
            start, members = blocks[-1].end, []
        members.append(length)
    return [*blocks, block_of(start, members, device, prompt)]


def block_of(start: int, lengths: list[int], device: torch.device, prompt: slice | None) -> Block:
    longest = max(lengths)
    slots = None
    if min(lengths) < longest:
        rows = [torch.arange(row * longest, row * longest + length) for row, length in enumerate(lengths)]
        slots = torch.cat(rows).to(device)
    return Block(start, start + sum(lengths), len(lengths), longest, slots, prompt)


class BlockAttention(torch.autograd.Function):
    """``(q [T, H, D], k [T, K, D], v [T, K, Dv], blocks, scale, window, softcap) -> [T, H, Dv]``.

    Zero for tokens behind the last block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: list[Block],
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how = blocks, scale, window, softcap
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        out[blocks[-1].end :] = 0
        for block in blocks:
            queries, keys, values = block.pack(q), block.pack_keys(k), block.pack_keys(v)
            if window is None and softcap is None and q.shape[-1] == v.shape[-1]:
                seen = torch.ones(block.length, keys.shape[2], dtype=torch.bool, device=q.device).tril(block.before)
                how: dict[str, Any] = {"is_causal": True} if block.prompt is None else {"attn_mask": seen}
                result = scaled_dot_product_attention(
                    queries, keys, values, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **how
                )
            else:
                result = tiled_forward(queries, keys, values, scale, window, softcap)
            block.unpack(result, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        blocks, scale, window, softcap = ctx.how
        wide = torch.promote_types(q.dtype, torch.float32) if blocks[-1].prompt else q.dtype  # sums over responses
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide)
        for grad in (dq, dk, dv):
            grad[blocks[-1].end :] = 0
        for block in blocks:  # prompts come before their responses, so there is something to add to
            parts = block.pack(q), block.pack_keys(k), block.pack_keys(v), block.pack(grads[0])
            by_query, by_key, by_value = tiled_backward(*parts, scale, window, softcap)
            block.unpack(by_query, dq)
            block.add_keys(by_key, dk)
            block.add_keys(by_value, dv)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


@dataclass(frozen=True)
class Tile:
    """Some queries of a block, and the keys that any of them sees."""

    queries: slice
    keys: slice
    bias: Tensor
    """``[1, G * queries, keys]``, -inf where a query does not see a key, else 0."""


def tiles(queries: Tensor, keys: int, window: int | None) -> Iterator[Tile]:
    """Of ``queries [n, G, length, D]``, which are the last of so many keys."""
    groups, length = queries.shape[1:3]
    before = keys - length
    place = torch.arange(keys, device=queries.device)
    for start in range(0, length, TILE):
        end = min(start + TILE, length)
        first = 0 if window is None else max(0, before + start - window + 1)
        query, key = place[before + start : before + end, None], place[None, first : before + end]
        hidden = key > query if window is None else (key > query) | (key <= query - window)
        bias = queries.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        yield Tile(slice(start, end), slice(first, before + end), bias.repeat(groups, 1).unsqueeze(0))


def probabilities(
    queries: Tensor, keys: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """softmax(c tanh(s q k / c)) of ``queries [n, G * q, D]`` and ``keys [n, k, D]``; the tanh, if there is a cap."""
    if softcap is None:
        return torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scale).softmax(-1), None
    bent = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale / softcap).tanh_()
    return (bent * softcap).add_(bias).softmax(-1), bent


def grouped(queries: Tensor, kv_heads: int) -> Tensor:
    """``[rows, H, length, D] -> [rows * K, H / K, length, D]``: the queries that share a key, together."""
    rows, heads, length, dim = queries.shape
    return queries.reshape(rows * kv_heads, heads // kv_heads, length, dim)


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    queries, keys, values = grouped(q, k.shape[1]), k.flatten(0, 1), v.flatten(0, 1)
    out = queries.new_empty(*queries.shape[:3], v.shape[-1])
    for tile in tiles(queries, k.shape[2], window):
        tile_q = queries[:, :, tile.queries]
        p, _ = probabilities(tile_q.flatten(1, 2), keys[:, tile.keys], tile.bias, scale, softcap)
        out[:, :, tile.queries] = torch.bmm(p, values[:, tile.keys]).view(*tile_q.shape[:3], -1)
    return out.view(*q.shape[:3], -1)


def tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dV = P' dO, dP = dO V', dS = P (dP - sum(P dP)), dQ = s dS K, dK = s dS' Q; dS times 1 - tanh^2 under a cap."""
    queries, grads = grouped(q, k.shape[1]), grouped(grad, k.shape[1])
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(queries)
    dk, dv = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
    for tile in tiles(queries, k.shape[2], window):
        tile_q, tile_grad = (x[:, :, tile.queries].flatten(1, 2) for x in (queries, grads))
        tile_k, tile_v = keys[:, tile.keys], values[:, tile.keys]
        p, bent = probabilities(tile_q, tile_k, tile.bias, scale, softcap)
        dv[:, tile.keys] += torch.bmm(p.transpose(1, 2), tile_grad)
        dp = torch.bmm(tile_grad, tile_v.transpose(1, 2))
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(scale)
        if bent is not None:
            ds -= ds * bent.square_()
        dq[:, :, tile.queries] = torch.bmm(ds, tile_k).view(*dq.shape[:2], -1, dq.shape[-1])
        dk[:, tile.keys] += torch.bmm(ds.transpose(1, 2), tile_q)
    return dq.view_as(q), dk.view_as(k).to(k.dtype), dv.view_as(v).to(v.dtype)
