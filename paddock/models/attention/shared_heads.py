"""Ranks that share sequences and attention heads (Ulysses): all-to-alls around the attention of packed sequences.

One all-to-all gives each rank all tokens of a share of the heads, and a second one gives its slice of the tokens back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paddock.kernels.arguments import Scores
from paddock.models.attention.packed import Packed

Way = Callable[[Tensor, dist.ProcessGroup], Tensor]


class SharedHeads(Packed):
    """Packed sequences of which this rank holds the tokens of one slice, of all heads."""

    def __init__(self, packed: Packed, padding: int, ranks: dist.ProcessGroup):
        super().__init__([*packed.lengths, *([padding] if padding else [])], packed.device)
        self.may_grow = False
        self.ranks = ranks

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        if scores.sinks is not None:
            scores = replace(scores, sinks=scores.sinks.chunk(self.ranks.size())[dist.get_rank(self.ranks)])
        heads = [Exchange.apply(x[0], to_heads, from_heads, self.ranks)[None] for x in (query, key, value)]
        found = super().attend(module, heads[0], heads[1], heads[2], scores)
        return Exchange.apply(found[0].transpose(0, 1), from_heads, to_heads, self.ranks).transpose(0, 1)[None]


def exchange(parts: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Part i of ``[ranks, ...]`` goes to rank i; what comes back from rank i becomes part i."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=ranks)
    return received


def to_heads(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """``[H, T / s, D] -> [H / s, T, D]``"""
    heads, tokens, dim = x.shape
    received = exchange(x.view(ranks.size(), heads // ranks.size(), tokens, dim), ranks)
    return received.transpose(0, 1).reshape(heads // ranks.size(), -1, dim)


def from_heads(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """``[H / s, T, D] -> [H, T / s, D]``"""
    heads, tokens, dim = x.shape
    received = exchange(x.view(heads, ranks.size(), tokens // ranks.size(), dim).transpose(0, 1), ranks)
    return received.reshape(heads * ranks.size(), -1, dim)


class Exchange(torch.autograd.Function):
    """``(x, there, back, ranks) -> there(x, ranks)``; its gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way, ranks: dist.ProcessGroup) -> Tensor:
        ctx.back, ctx.ranks = back, ranks
        return there(x.contiguous(), ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0].contiguous(), ctx.ranks), None, None, None
