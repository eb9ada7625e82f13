"""Attention over a KV cache with one row per token (`TokenPool`), by a decode kernel of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from paddock.core.device import to_device
from paddock.kernels.arguments import Pieces, Scores
from paddock.kernels.choice import kernels_for
from paddock.models.attention.interface import layer_of
from paddock.models.attention.packed import Packed
from paddock.models.attention.shared_prompts import ranges


class PoolBuffers(Protocol):
    """The part of a pool that attention reads and writes. Columns ``[sequences]`` hold rows of the buffers."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    prompt: Tensor
    """int32: the row of each prompt's first token."""
    prompt_length: Tensor
    answer: Tensor
    """int32: the row of each response's first token."""
    shares: bool
    """True if decode attention is to read a prompt once for several of its responses, which kernels of a GPU can."""

    def layer(self, index: int, heads: int, key_dim: int, value_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values ``[rows, heads, dim]`` of a layer."""
        ...


class PoolPrefill(Packed):
    """Prompts end to end, each attending to itself, whose keys and values are written to the pool."""

    def __init__(self, pool: PoolBuffers, lengths: Sequence[int], starts: Sequence[int], device: torch.device):
        super().__init__(lengths, device)
        self.pool = pool
        self.rows = to_device(ranges(starts, lengths), device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        index, stored = layer_of(module), alike(key, value)
        buffers = self.pool.layer(index, key.shape[1], stored[0].shape[3], stored[1].shape[3], key)
        for buffer, stream in zip(buffers, stored, strict=True):
            buffer.index_copy_(0, self.rows, stream[0, :, : len(self.rows)].transpose(0, 1).to(buffer.dtype))
        return super().attend(module, query, key, value, scores)


class PoolDecode:
    """Queries of one token each: over the prompt of its sequence, the answer up to itself, and itself.

    One for each of the first sequences of the pool, and one for each row of `beside`: those may be of the same
    sequences, for all keys and values of a layer are stored before it attends.
    """

    def __init__(self, pool: PoolBuffers, lengths: Tensor, done: Tensor, beside: Pieces | None = None):
        """`lengths`: tokens before the query in each of the sequences."""
        self.pool = pool
        prompt, prompt_length, answer = (x[: len(lengths)] for x in (pool.prompt, pool.prompt_length, pool.answer))
        row = answer + lengths - prompt_length
        pieces = Pieces(prompt, prompt_length, answer, lengths.masked_fill(done, 0))
        if beside is not None:
            row = torch.cat([row, beside.answer + beside.length - beside.prompt_length])
            pieces = pieces.followed_by(beside)
        if pool.shares:
            pieces = replace(pieces, by_prompt=kernels_for(lengths).rows_by_prompt(pieces))
        self.row, self.pieces = row, pieces

    def buffers(self, layer: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns keys and values ``[rows, K, D]`` of a layer, and the row of each token of this forward: the kernel
        that makes keys and values stores them."""
        return *self.pool.layer(layer, heads, dim, dim, like), self.row

    def attend_stored(self, layer: int, query: Tensor, scores: Scores, exact: bool = False) -> Tensor:
        """Computes attention over the cache for ``query [T, H, D]``; returns the same shape."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        return kernels_for(query).decode_attention(query, keys, values, self.pieces, scores, exact)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Stores keys and values ``[rows, heads, 1, dim]`` that a module made itself, then attends to them."""
        index = layer_of(module)
        asked, stored, wide = alike(query, value)[0], alike(key, value), value.shape[3]
        buffers = self.pool.layer(index, key.shape[1], stored[0].shape[3], stored[1].shape[3], key)
        for buffer, new in zip(buffers, stored, strict=True):
            buffer.index_copy_(0, self.row, new[:, :, 0].to(buffer.dtype))
        found = self.attend_stored(index, asked[:, :, 0].contiguous(), scores)
        return found[:, None, :, :wide]


def alike(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Pads the narrower of the two with zeros, which add nothing to a score or are cut off: kernels read one width."""
    missing = key.shape[3] - value.shape[3]
    return pad(key, (0, max(0, -missing))), pad(value, (0, max(0, missing)))
