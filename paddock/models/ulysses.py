"""Ulysses sequence parallelism: ranks share each sequence, and each other's attention heads.

Every rank holds a slice of the packed tokens for all that works token by token. Around attention, an all-to-all gives
each rank all tokens of a share of the heads, and a second one gives the slices back. arXiv:2309.14509
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from paddock.core.batch import PerToken
from paddock.errors import UserError
from paddock.models.attention.shared_heads import SharedHeads
from paddock.models.packing import Inputs


class SumOfSlices(torch.autograd.Function):
    """Sums values over the ranks, each of which has those of its own tokens, and zero elsewhere.

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
    """Sums integers over the ranks, each of which has those of its own tokens, and zero elsewhere."""
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


def require_divisible_heads(config: PreTrainedConfig, ranks: int, key: str, beside: int = 1) -> None:
    """Refuses ranks over which the model's heads do not divide. `beside`: ranks that share the heads of each."""
    text = config.get_text_config()
    queries, keys = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for what, heads in (("attention heads", queries), ("key and value heads", keys)):
        if heads % (ranks * beside):
            most = max(n for n in range(1, ranks) if queries % (n * beside) == keys % (n * beside) == 0)
            reason = f"the model's {heads} {what} do not divide over {ranks * beside} ranks"
            raise UserError(reason, key=key, value=ranks, fix=f"{key}={most}")
