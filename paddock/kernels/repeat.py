"""Kernels that repeat keys and values of a prompt for each response to it, and sum the gradients of all copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paddock.core.device import to_device
from paddock.kernels.arguments import Stretch
from paddock.kernels.launch import power_of_two

BLOCK = 4096  # numbers of a tile


class Tiles(NamedTuple):
    """Holds stretches, cut into tiles of which a program copies one."""

    table: Tensor
    """int32 ``[5, tiles]``: first token in the stream, tokens, place in `starts`, copies, tokens of the stretch before
    it."""
    starts: Tensor
    """int32: the copies of all stretches."""

    @classmethod
    def of(cls, stretches: Sequence[Stretch], width: int, device: torch.device) -> Tiles:
        """`width`: numbers of a token."""
        most = max(1, BLOCK // width)
        begins, lengths, copies = (
            np.array(column, np.int64)
            for column in zip(*((s.start, s.length, len(s.copies)) for s in stretches), strict=True)
        )
        count = -(-lengths // most)
        which = np.arange(len(begins)).repeat(count)
        before = (np.arange(count.sum()) - (count.cumsum() - count)[which]) * most
        columns = (begins[which] + before, np.minimum(lengths[which] - before, most), (copies.cumsum() - copies)[which],
                   copies[which], before)  # fmt: skip
        starts = torch.tensor([start for s in stretches for start in s.copies], dtype=torch.int32)
        table = torch.from_numpy(np.stack(columns).astype(np.int32))
        return cls(to_device(table, device), to_device(starts, device))


@triton.jit
def copy_tiles(
    KEYS, VALUES, OUT, TABLE, STARTS, tiles, width, size, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT [2, size]: each token of KEYS and VALUES at all its places; or, where it SUMS, the other way round."""
    tile, second = tl.program_id(0), tl.program_id(1)
    token, tokens = tl.load(TABLE + tile).to(tl.int64), tl.load(TABLE + tiles + tile)
    first, copies = tl.load(TABLE + 2 * tiles + tile), tl.load(TABLE + 3 * tiles + tile)
    before = tl.load(TABLE + 4 * tiles + tile)
    at = tl.arange(0, BLOCK)
    inside = at < tokens * width
    own, out = token * width + at, OUT + second.to(tl.int64) * size
    if SUMS:
        total = tl.zeros((BLOCK,), tl.float32)
        for copy in range(copies):
            place = (tl.load(STARTS + first + copy).to(tl.int64) + before) * width + at
            if second == 0:
                total += tl.load(KEYS + place, mask=inside, other=0.0).to(tl.float32)
            else:
                total += tl.load(VALUES + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + own, total.to(OUT.dtype.element_ty), mask=inside)
    else:
        if second == 0:
            x = tl.load(KEYS + own, mask=inside, other=0.0)
        else:
            x = tl.load(VALUES + own, mask=inside, other=0.0)
        for copy in range(copies):
            place = (tl.load(STARTS + first + copy).to(tl.int64) + before) * width + at
            tl.store(out + place, x, mask=inside)


def repeat(keys: Tensor, values: Tensor, tiles: Tiles, rows: int) -> tuple[Tensor, Tensor]:
    """Copies tokens of ``keys, values [T, K, D]`` to all their places: ``[rows, K, D]`` each."""
    return launch(keys, values, tiles, keys.new_empty(2, rows, *keys.shape[1:]), sums=False)


def repeat_backward(dkeys: Tensor, dvalues: Tensor, tiles: Tiles, tokens: int) -> tuple[Tensor, Tensor]:
    """Sums the gradients of all copies of a token, in float32 and in the order of the copies: ``[tokens, K, D]`` each;
    zeros for tokens of which there are none."""
    return launch(dkeys, dvalues, tiles, dkeys.new_zeros(2, tokens, *dkeys.shape[1:]), sums=True)


def launch(keys: Tensor, values: Tensor, tiles: Tiles, out: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    count, width = tiles.table.shape[1], keys[0].numel()
    copy_tiles[(count, 2)](
        keys.contiguous(), values.contiguous(), out, tiles.table, tiles.starts, count, width, out[0].numel(), sums,
        power_of_two(max(1, BLOCK // width) * width), num_warps=4,
    )  # fmt: skip
    return out[0], out[1]
