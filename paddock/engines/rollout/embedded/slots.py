"""KV cache with one rectangle per sequence, which SDPA reads at once. `pool.py` is the same for decode kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.engines.rollout.base import Request
from paddock.engines.rollout.embedded.sequences import Extension, KeyValues, NewTokens
from paddock.models.attention.shared_prompts import ranges
from paddock.models.attention.slot_attention import SlotDecode, SlotPrefill

Parked = dict[int, tuple[Tensor, Tensor]]
"""Keys and values ``[kv_heads, tokens, head_dim]`` of a layer."""


class Slots(KeyValues):
    """Keys and values, each a buffer ``[slots, kv_heads, max_len, head_dim]`` a layer, made at first use. A sequence
    owns the slot of its number, so there is nothing to reserve or to forget."""

    def __init__(self, count: int, max_len: int):
        self.count = count
        self.max_len = max_len
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the buffers of a layer, shaped after what it stores."""
        if index not in self.keys:
            for buffers, like in ((self.keys, key), (self.values, value)):
                shape = self.count, like.shape[1], self.max_len, like.shape[3]
                # Zeros: a masked key's weight is 0, and 0 x what memory happens to hold may not be.
                buffers[index] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self.keys[index], self.values[index]

    def admit(self, requests: Sequence[Request]) -> int:
        return len(requests)

    def park(self, row: int, tokens: int) -> Parked:
        """Copies what a slot holds, for another sequence will have the slot."""
        return {
            layer: (self.keys[layer][row, :, :tokens].clone(), self.values[layer][row, :, :tokens].clone())
            for layer in self.keys
        }

    def unpark(self, rows: range, held: Sequence[Parked]) -> None:
        for row, parked in zip(rows, held, strict=True):
            for layer, (keys, values) in parked.items():
                self.keys[layer][row, :, : keys.shape[1]] = keys
                self.values[layer][row, :, : values.shape[1]] = values

    def move(self, sources: Tensor, targets: Tensor, movers: Sequence[int], holes: Sequence[int], held: Tensor) -> None:
        """Copies the positions of some slots that hold something over others."""
        longest = int(held.max())
        for buffer in (*self.keys.values(), *self.values.values()):
            buffer[targets, :, :longest] = buffer[sources, :, :longest]

    def prefill(self, lengths: Sequence[int], targets: Sequence[range], device: torch.device) -> SlotPrefill:
        return SlotPrefill(self, lengths, targets, device)

    def extend(self, new: Sequence[NewTokens]) -> Extension | None:
        parts = [(part.row, part.held, len(part.tokens)) for part in new if part.tokens]
        if not parts:
            return None
        device = next(iter(self.keys.values())).device
        tokens = torch.tensor([token for part in new for token in part.tokens])
        positions = ranges([part.held + part.offset for part in new], [len(part.tokens) for part in new])
        return Extension(tokens.to(device), positions.to(device), parts)

    def decode(self, lengths: Tensor, done: Tensor, beside: Extension | None = None) -> SlotDecode:
        """Finished slots are gone here, for the host looks after each step; free ones may be read, to no effect."""
        return SlotDecode(self, lengths, beside.where if beside else ())
