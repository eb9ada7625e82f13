"""Attention with a sink: each head has one more score, which takes probability and gives nothing (gpt-oss).

Packed sequences and padded rows take plain matrix products, tile by tile, formed again in backward: of the kernels only
that of decode knows sinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paddock.kernels.arguments import Scores
from paddock.models.attention.blocks import Block, grouped


def with_sink(scores: Tensor, sinks: Tensor) -> Tensor:
    """softmax over ``[..., keys]`` and one sink a row ``[..., 1]``: the keys' share of it, in float32 or better."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.cat([scores, sinks.to(scores.dtype)], -1).softmax(-1, dtype=wide)[..., :-1]


def packed_sinks(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scores: Scores) -> Tensor:
    """``(q [T, H, D], k [T, K, D], v [T, K, Dv]) -> [T, H, Dv]``; see `BlockAttention`."""
    assert scores.sinks is not None
    found = []
    for block in blocks:
        queries, keys, values = grouped(block.pack(q), k.shape[1]), block.pack_keys(k), block.pack_keys(v)
        per_query = scores.sinks.view(k.shape[1], -1).repeat(block.rows, 1)  # [rows * K, H / K]
        parts = []
        for tile in block.tiles(queries, keys, scores.window):
            tile_q = queries[:, :, tile.queries]
            column = per_query.repeat_interleave(tile_q.shape[2], 1).unsqueeze(-1)
            tile_k, tile_v = (x.flatten(0, 1)[:, tile.keys] for x in (keys, values))
            out = checkpoint(one_tile, tile_q.flatten(1, 2), tile_k, tile_v, tile.bias, scores.scaling, column,
                             use_reentrant=False, preserve_rng_state=False)  # fmt: skip
            parts.append(out.view(*tile_q.shape[:3], -1))
        whole = torch.cat(parts, 2).view(block.rows, q.shape[1], block.length, -1)
        tokens = whole.transpose(1, 2).flatten(0, 1)
        found.append(tokens if block.slots is None else tokens.index_select(0, block.slots))
    found.append(q.new_zeros(len(q) - blocks[-1].end, *q.shape[1:2], v.shape[-1]))
    return torch.cat(found)


def one_tile(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, sinks: Tensor) -> Tensor:
    scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(with_sink(scores, sinks).to(values.dtype), values)
