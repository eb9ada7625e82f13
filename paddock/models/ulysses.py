"""Ulysses sequence parallelism: ranks share each sequence, and each other's attention heads.

Every rank holds a slice of the packed tokens for all that works token by token. Around attention, an all-to-all gives
each rank all tokens of a share of the heads, and a second one gives the slices back. arXiv:2309.14509
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from paddock.core.batch import PerToken
from paddock.errors import UserError
from paddock.models.attention import Packed
from paddock.models.packing import Inputs


class SharedHeads(Packed):
    """Packed sequences of which this rank holds the tokens of one slice, of all heads."""

    def __init__(self, packed: Packed, padding: int, ranks: dist.ProcessGroup):
        super().__init__([*packed.lengths, *([padding] if padding else [])], packed.device)
        self.may_grow = False
        self.ranks = ranks

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None:
            sinks = sinks.chunk(self.ranks.size())[dist.get_rank(self.ranks)]
        heads = [ToHeads.apply(x[0], self.ranks)[None] for x in (query, key, value)]
        found = super().attend(module, heads[0], heads[1], heads[2], scaling, window, softcap, sinks)
        return ToTokens.apply(found[0], self.ranks)[None]


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


class ToHeads(torch.autograd.Function):
    """From a slice of the tokens with all heads to all tokens of a share of the heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return to_heads(x.contiguous(), ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return from_heads(grads[0].contiguous(), ctx.ranks), None


class ToTokens(torch.autograd.Function):
    """The way back: ``[T, H / s, D] -> [T / s, H, D]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return from_heads(x.transpose(0, 1).contiguous(), ranks).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return to_heads(grads[0].transpose(0, 1).contiguous(), ctx.ranks).transpose(0, 1), None


class SumOfSlices(torch.autograd.Function):
    """Values that each rank has of its own tokens, zero elsewhere, become everyone's.

    All ranks then compute the same loss; its gradient goes back to the tokens' own rank, and to no other.
    """

    @staticmethod
    def forward(ctx: Any, x: PerToken, ranks: dist.ProcessGroup) -> PerToken:
        whole = x.clone()
        dist.all_reduce(whole, group=ranks)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def joined_slices(column: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Whole numbers that each rank has of its own tokens, zero elsewhere, of all of them."""
    whole = column.int()  # not every backend adds smaller ones
    dist.all_reduce(whole, group=ranks)
    return whole.to(column.dtype)


def slice_of(inputs: Inputs, ranks: dist.ProcessGroup) -> Inputs:
    """This rank's slice of packed inputs; a last sequence of padding makes slices equal."""
    assert inputs.packed is not None
    padding = -inputs.tokens.shape[1] % ranks.size()
    length = (inputs.tokens.shape[1] + padding) // ranks.size()
    start = dist.get_rank(ranks) * length
    extra = torch.arange(padding, device=inputs.tokens.device)[None]
    more = extra.expand(*inputs.positions.shape[:-1], -1)
    tokens = torch.cat([inputs.tokens, torch.zeros_like(extra)], 1)[:, start : start + length]
    positions = torch.cat([inputs.positions, more], -1)[..., start : start + length]
    cells = torch.cat([inputs.cells, torch.full((padding,), -1, device=inputs.cells.device)])
    mine = (inputs.states >= start) & (inputs.states < start + length)
    return replace(
        inputs,
        tokens=tokens,
        positions=positions,
        packed=SharedHeads(inputs.packed, padding, ranks),
        states=inputs.states[mine] - start,
        targets=inputs.targets[mine],
        places=inputs.places[mine],
        cells=cells[start : start + length],
        images=inputs.images and inputs.images.part(start, length),
    )


def require_divisible_heads(config: PreTrainedConfig, ranks: int, key: str) -> None:
    text = config.get_text_config()
    keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for what, heads in (("attention heads", text.num_attention_heads), ("key and value heads", keys)):
        if heads % ranks:
            most = max(n for n in range(1, ranks) if keys % n == 0 and text.num_attention_heads % n == 0)
            raise UserError(
                f"the model's {heads} {what} do not divide over {ranks} ranks",
                key=key,
                value=ranks,
                fix=f"{key}={most}",
            )
