"""Attention of packed sequences in rectangular blocks, forward and backward, in plain matrix products.

Neighbouring sequences of similar length form a block ``[rows, length]``, padded at the right: with a causal mask no
query sees the padding behind it. Blocks of equal lengths are views. Only q, k and v are kept for backward, which forms
a block's probabilities again: on a CPU in bf16, that takes a third of the time of SDPA's own backward.

A CPU compiles a product anew for every shape, and keeps it: blocks that are padded are padded to lengths that recur.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paddock.kernels.arguments import Scores

FULL = 0.8
"""The shortest sequence of a block has at least this share of its longest one's tokens, and all fill so much of it."""
TILE = 128
"""Queries that are multiplied with their keys at a time: keys behind a tile's last query are skipped."""
MAX_SCORES = 1 << 18
"""Scores of one head that exist at a time: those of all heads stay in a CPU's cache."""


ROUND = 8
"""Lengths of prompts are multiples of it, and those of padded sequences where that adds little."""


@dataclass(frozen=True)
class PromptBlock:
    """Tokens of the stream that some neighbouring rows of a block see before their own sequence."""

    rows: slice
    tokens: slice

    @property
    def length(self) -> int:
        return self.tokens.stop - self.tokens.start


@dataclass(frozen=True, eq=False)
class Block:
    """Some neighbouring sequences of the stream."""

    start: int
    end: int
    rows: int
    length: int
    slots: Tensor | None
    """Index of each token of the stream in the flattened block; None: it fills the block in order."""
    prompts: tuple[PromptBlock, ...] = ()
    before: int = 0
    """Keys of the longest prompt, at least. A sequence's own follow those of its prompt, as in a rollout's cache, so
    that sums are rounded alike; zeros that no query sees come last."""
    known_tiles: dict[Any, list[Tile]] = field(default_factory=dict)
    """Tiles by kind of layer: those of a layer serve the next one as well."""

    def pack(self, stream: Tensor) -> Tensor:
        """``[T, heads, dim] -> [rows, heads, length, dim]``, zeros behind each sequence's end."""
        part = stream[self.start : self.end]
        if self.slots is not None:
            part = part.new_zeros(self.rows * self.length, *part.shape[1:]).index_copy_(0, self.slots, part)
        return part.view(self.rows, self.length, *part.shape[1:]).transpose(1, 2)

    def pack_keys(self, stream: Tensor) -> Tensor:
        """Packs keys or values into ``[rows, heads, before + length, dim]``, the prompt's before a sequence's own."""
        own = self.pack(stream)
        if not self.prompts:
            return own
        keys = own.new_empty(*own.shape[:2], self.before + self.length, own.shape[3])
        for prompt in self.prompts:
            end = prompt.length + self.length
            keys[prompt.rows, :, : prompt.length] = stream[prompt.tokens].transpose(0, 1)
            keys[prompt.rows, :, prompt.length : end] = own[prompt.rows]
            keys[prompt.rows, :, end:] = 0
        return keys

    def unpack(self, block: Tensor, stream: Tensor) -> None:
        """Writes a block ``[rows, heads, length, dim]`` to its tokens in the stream."""
        tokens = block.transpose(1, 2)
        part = stream[self.start : self.end]
        if self.slots is None:
            part.view(tokens.shape).copy_(tokens)
        else:
            part.copy_(tokens.reshape(self.rows * self.length, *part.shape[1:]).index_select(0, self.slots))

    def add_keys(self, block: Tensor, stream: Tensor) -> None:
        """Writes gradients ``[rows, heads, before + length, dim]``; those of a shared prompt are added to what is
        there."""
        if not self.prompts:
            return self.unpack(block, stream)
        own = []
        for prompt in self.prompts:
            shared, rest = block[prompt.rows].split([prompt.length, block.shape[2] - prompt.length], 2)
            stream[prompt.tokens] += shared.sum(0).transpose(0, 1)
            own.append(rest[:, :, : self.length])
        self.unpack(torch.cat(own) if len(own) > 1 else own[0], stream)

    def tiles(self, queries: Tensor, keys: Tensor, window: int | None) -> list[Tile]:
        """Returns the tiles of ``queries [rows * K, G, length, D]`` and ``keys [rows, K, before + length, D]``."""
        kind = keys.shape[1], queries.shape[1], queries.dtype, window
        if kind not in self.known_tiles:
            shorter = torch.zeros(self.rows, dtype=torch.long, device=queries.device)
            for prompt in self.prompts:
                shorter[prompt.rows] = self.before - prompt.length
            most = max((self.before - prompt.length for prompt in self.prompts), default=0)
            back = shorter.repeat_interleave(keys.shape[1])[:, None, None] if most else None
            self.known_tiles[kind] = list(tiles(queries, keys.shape[2], window, back, most))
        return self.known_tiles[kind]


def blocks_of(
    lengths: Sequence[int], device: torch.device, start: int = 0, prompts: Sequence[slice] | None = None
) -> list[Block]:
    """Cuts the stream from `start` on where lengths begin to differ much, or a block's scores would be too many.

    `prompts`: where each sequence's prompt stands in the stream.
    """
    seen = [0] * len(lengths) if prompts is None else [prompt.stop - prompt.start for prompt in prompts]
    blocks: list[Block] = []
    first = 0
    for last in range(1, len(lengths) + 1):
        members, before = lengths[first : last + 1], seen[first : last + 1]
        longest = rounded(max(members))
        too_many = len(members) * min(longest, TILE) * (max(before) + longest) > MAX_SCORES
        unlike = min(members) < FULL * max(members) or min(before) < FULL * max(before)
        if last == len(lengths) or too_many or unlike:
            own = None if prompts is None else prompts[first:last]
            blocks.append(block_of(start, lengths[first:last], device, own))
            start, first = blocks[-1].end, last
    return blocks


def block_of(start: int, lengths: Sequence[int], device: torch.device, prompts: Sequence[slice] | None) -> Block:
    rows, longest, slots = len(lengths), max(lengths), None
    recurs = rounded(longest)
    if (min(lengths) < longest or rows < ROUND) and sum(lengths) >= FULL * rows * recurs:
        longest = recurs
    if min(lengths) < longest:
        indices = [torch.arange(row * longest, row * longest + length) for row, length in enumerate(lengths)]
        slots = torch.cat(indices).to(device)
    end = start + sum(lengths)
    if prompts is None:
        return Block(start, end, rows, longest, slots)
    changes = [row for row in range(rows) if row == 0 or prompts[row] != prompts[row - 1]]
    spans = zip(changes, [*changes[1:], rows], strict=True)
    found = tuple(PromptBlock(slice(first, last), prompts[first]) for first, last in spans)
    return Block(start, end, rows, longest, slots, found, rounded(max(prompt.length for prompt in found)))


def rounded(length: int) -> int:
    return -(-length // ROUND) * ROUND


class BlockAttention(torch.autograd.Function):
    """``(q [T, H, D], k [T, K, D], v [T, K, Dv], blocks, scores) -> [T, H, Dv]``.

    Zero for tokens behind the last block.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block], scores: Scores) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how = blocks, scores
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        out[blocks[-1].end :] = 0
        plain = scores.window is None and scores.softcap is None and q.shape[-1] == v.shape[-1]
        for block in blocks:
            queries, keys, values = block.pack(q), block.pack_keys(k), block.pack_keys(v)
            if plain and not block.prompts:
                gqa = q.shape[1] != k.shape[1]
                result = scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, scale=scores.scaling, enable_gqa=gqa
                )
            else:
                result = tiled_forward(block, queries, keys, values, scores)
            block.unpack(result, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        blocks, scores = ctx.how
        wide = torch.promote_types(q.dtype, torch.float32) if blocks[-1].prompts else q.dtype  # sums over responses
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide)
        for grad in (dq, dk, dv):
            grad[blocks[-1].end :] = 0
        for block in blocks:  # prompts come before their responses, so there is something to add to
            parts = block.pack(q), block.pack_keys(k), block.pack_keys(v), block.pack(grads[0])
            by_query, by_key, by_value = tiled_backward(block, *parts, scores)
            block.unpack(by_query, dq)
            block.add_keys(by_key, dk)
            block.add_keys(by_value, dv)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


@dataclass(frozen=True)
class Tile:
    """Some queries of a block, and the keys that any of them sees."""

    queries: slice
    keys: slice
    bias: Tensor
    """``[1 or n, G * queries, keys]``, -inf where a query does not see a key, else 0."""


def tiles(queries: Tensor, keys: int, window: int | None, back: Tensor | None, most: int) -> Iterator[Tile]:
    """Yields the tiles of ``queries [n, G, length, D]``. They are the last of `keys` keys, or begin `back` ``[n, 1,
    1]`` keys earlier, at most `most`."""
    groups, length = queries.shape[1:3]
    before = keys - length
    position = torch.arange(keys, device=queries.device)
    for start in range(0, length, TILE):
        end = min(start + TILE, length)
        first = 0 if window is None else max(0, before + start - most - window + 1)
        query, key = position[None, before + start : before + end, None], position[first : before + end]
        query = query if back is None else query - back
        hidden = key > query if window is None else (key > query) | (key <= query - window)
        bias = queries.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        yield Tile(slice(start, end), slice(first, before + end), bias.repeat(1, groups, 1))


def probabilities(queries: Tensor, keys: Tensor, bias: Tensor, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """softmax(c tanh(s q k / c)) of ``queries [n, G * q, D]`` and ``keys [n, k, D]``; the tanh, if there is a cap."""
    if scores.softcap is None:
        return torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scores.scaling).softmax(-1), None
    bent = torch.bmm(queries, keys.transpose(1, 2)).mul_(scores.scaling / scores.softcap).tanh_()
    return (bent * scores.softcap).add_(bias).softmax(-1), bent


def grouped(queries: Tensor, kv_heads: int) -> Tensor:
    """``[rows, H, length, D] -> [rows * K, H / K, length, D]``: the queries that share a key, together."""
    rows, heads, length, dim = queries.shape
    return queries.reshape(rows * kv_heads, heads // kv_heads, length, dim)


def tiled_forward(block: Block, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    queries, keys, values = grouped(q, k.shape[1]), k.flatten(0, 1), v.flatten(0, 1)
    parts = []
    for tile in block.tiles(queries, k, scores.window):
        tile_q = queries[:, :, tile.queries]
        tile_k, tile_v = keys[:, tile.keys], values[:, tile.keys]
        if scores.softcap is None and q.shape[-1] == v.shape[-1]:
            heads = [x.unsqueeze(1) for x in (tile_q.flatten(1, 2), tile_k, tile_v, tile.bias)]
            result = scaled_dot_product_attention(heads[0], heads[1], heads[2], heads[3], scale=scores.scaling)
        else:
            p, _ = probabilities(tile_q.flatten(1, 2), tile_k, tile.bias, scores)
            result = torch.bmm(p, tile_v)
        parts.append(result.view(*tile_q.shape[:3], -1))
    return joined(parts).view(*q.shape[:3], -1)


def tiled_backward(
    block: Block, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """dV = P' dO, dP = dO V', dS = P (dP - sum(P dP)), dQ = s dS K, dK = s dS' Q; dS times 1 - tanh^2 under a cap."""
    queries, grads = grouped(q, k.shape[1]), grouped(grad, k.shape[1])
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    layout, parts = block.tiles(queries, k, scores.window), []
    whole = layout[0].keys == slice(0, k.shape[2])  # the only tile, and it has all keys
    if not whole:
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
    for tile in layout:
        tile_q, tile_grad = (x[:, :, tile.queries].flatten(1, 2) for x in (queries, grads))
        tile_k, tile_v = keys[:, tile.keys], values[:, tile.keys]
        p, bent = probabilities(tile_q, tile_k, tile.bias, scores)
        by_value = torch.bmm(p.transpose(1, 2), tile_grad)
        dp = torch.bmm(tile_grad, tile_v.transpose(1, 2))
        ds = torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(scores.scaling)
        if bent is not None:
            ds -= ds * bent.square_()
        parts.append(torch.bmm(ds, tile_k).view(*queries.shape[:2], -1, queries.shape[-1]))
        by_key = torch.bmm(ds.transpose(1, 2), tile_q)
        if whole:
            return parts[0].view(q.shape), by_key.view(k.shape), by_value.view(v.shape)
        dk[:, tile.keys] += by_key
        dv[:, tile.keys] += by_value
    return joined(parts).view(q.shape), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)


def joined(tiles: list[Tensor]) -> Tensor:
    """``[n, G, queries, D]`` of all tiles, one behind the other."""
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, 2)
