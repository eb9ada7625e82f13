"""Causal attention of packed sequences by the products of `decode.py`: the forward of exact numerics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paddock.core.device import to_device
from paddock.kernels.arguments import Scores
from paddock.kernels.decode import BLOCK, QUERIES, absorb, stages_of
from paddock.kernels.launch import power_of_two


@triton.jit
def attend_tiles(
    Q, K, V, OUT, START, FIRST, LENGTH, scale, softcap, window, heads, keys,
    ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Computes the attention of neighbouring queries of one sequence and one head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    start, first, length = tl.load(START + tile).to(tl.int64), tl.load(FIRST + tile), tl.load(LENGTH + tile)
    query, column = first + tl.arange(0, ROWS), tl.arange(0, WIDE)
    real = (query < length)[:, None] & (column < D)[None, :]
    at = ((start + query) * heads + head)[:, None] * D + column[None, :]
    q = tl.load(Q + at, mask=real, other=0.0)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDE), tl.float32)
    low = tl.maximum(0, first + 1 - window) // BLOCK * BLOCK if WINDOWED else 0
    for place in range(low, tl.minimum(first + ROWS, length), BLOCK):
        token = place + tl.arange(0, BLOCK)
        load = (token < length)[:, None] & (column < D)[None, :]
        where = ((start + token) * keys + head // (heads // keys))[:, None] * D + column[None, :]
        k = tl.load(K + where, mask=load, other=0.0)
        v = tl.load(V + where, mask=load, other=0.0)
        seen = token[None, :] <= query[:, None]
        if WINDOWED:
            seen = seen & (token[None, :] > query[:, None] - window)
        top, total, out = absorb(q, k, v, seen, top, total, out, scale, softcap, CAPPED, PRECISE)
    tl.store(OUT + at, (out / total[:, None]).to(OUT.dtype.element_ty), mask=real)


def tiles_of(lengths: list[int], device: torch.device) -> Tensor:
    """int32 ``[3, tiles]``: where a tile's sequence begins in the stream, its first query, the sequence's length."""
    rows, start = [], 0
    for length in lengths:
        rows += [(start, first, length) for first in range(0, length, QUERIES)]
        start += length
    return to_device(torch.tensor(rows, dtype=torch.int32).t().contiguous(), device)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scores: Scores) -> Tensor:
    """``q [T, H, D]``, ``k, v [T, K, D]``; returns ``[T, H, D]``."""
    heads, dim = q.shape[1:]
    out, wide = torch.empty_like(q), max(16, power_of_two(dim))
    attend_tiles[(tiles.shape[1], heads)](
        q.contiguous(), k.contiguous(), v.contiguous(), out, tiles[0], tiles[1], tiles[2], scores.scaling,
        scores.softcap or 1.0, scores.window or 0, heads, k.shape[1], QUERIES, dim, wide, BLOCK,
        scores.window is not None, scores.softcap is not None, q.dtype == torch.float32, num_warps=4,
        num_stages=stages_of(q, wide),
    )  # fmt: skip
    return out
