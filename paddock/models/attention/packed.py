"""Packed sequences: what the queries of training and prefill attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from paddock.core.device import flash_attention, to_device
from paddock.kernels.arguments import PromptGroups, Scores
from paddock.models.attention.blocks import Block, BlockAttention, blocks_of
from paddock.models.attention.choice import choose
from paddock.models.attention.interface import AttentionCall
from paddock.models.attention.short_attention import ShortAttention
from paddock.models.attention.sinks import packed_sinks


class Packed:
    """Sequences end to end in one row ``[1, T]``, each attending to itself, causally.

    Which implementation computes a layer is in choice.py. blocks.py computes neighbours of similar length together:
    sequences sorted by length make the fewest and fullest blocks.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu"):
        self.lengths = list(lengths)
        self.may_grow = True
        """True if tokens may come behind the last sequence; on a CPU they attend to nothing, and get zeros."""
        self.max_len = max(self.lengths, default=0)
        self.device = torch.device(device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 ``[sequences + 1]``: where each begins, and where the last one ends."""
        return to_device(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32), self.device)

    @property
    def spans(self) -> list[slice]:
        """Where each sequence is in the stream."""
        return [slice(end - length, end) for end, length in zip(accumulate(self.lengths), self.lengths, strict=True)]

    @cached_property
    def tiles(self) -> Tensor:
        """The tiles that the kernel of exact numerics reads."""
        from paddock.kernels.packed import tiles_of

        return tiles_of(self.lengths, self.device)

    @cached_property
    def blocks(self) -> list[Block]:
        return blocks_of(self.lengths, self.device)

    @cached_property
    def prompt_groups(self) -> PromptGroups:
        """The sequences as the kernel for short ones reads them: each is a group of its own."""
        return PromptGroups([[span] for span in self.spans])

    def flash(self, call: AttentionCall) -> Tensor:
        """Computes one layer's call with the device's own kernel."""
        scores = call.scores
        return flash_attention(call.q, call.k, call.v, self.cu_seqlens, self.lengths, scores.scaling, scores.window)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, H or K, D]
        if scores.window is not None and scores.window >= self.max_len:
            scores = replace(scores, window=None)
        call = AttentionCall(q, k, v, scores, self.max_len)
        way = choose("packed", call)
        if way == "flash":
            packed: Any = self.flash(call)
        elif way == "short":
            packed = ShortAttention.apply(q, k, v, self.prompt_groups, scores.scaling)
        elif way == "sinks":
            packed = packed_sinks(q, k, v, self.blocks, scores)
        else:
            packed = BlockAttention.apply(q, k, v, self.blocks, scores)
        return packed.unsqueeze(0)
