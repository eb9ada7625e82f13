"""Sums and means over the tokens that count, and over the rows that share a prompt.

Every matrix is ``[B, R]``; a mask is 1 (or True) on the tokens the policy wrote. What stands outside a mask is never
read, not even to be multiplied by zero, so padding may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.core.registry import suggest
from paddock.errors import UserError

EPS = 1e-8

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    kept = x.masked_fill(mask == 0, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """``sum(x * m) / (sum(m) + 1e-8)``: zero where nothing counts."""
    valid = mask != 0
    count = valid.sum() if dim is None else valid.sum(dim)
    return masked_sum(x, mask, dim) / (count + EPS)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` at every position; mean and unbiased variance over the valid ones."""
    masked = mask == 0
    count = mask.numel() - int(masked.count_nonzero())
    if count < 2:
        raise UserError(
            f"whitening needs at least two valid tokens in the batch, this one has {count}",
            fix="use a larger batch, or a wider rejection threshold if rollout_rs is set",
        )
    centred = x - x.masked_fill(masked, 0).sum() / count
    variance = centred.masked_fill(masked, 0).square_().sum() / (count - 1)
    return centred.mul_(torch.rsqrt(variance + EPS))


@dataclass(frozen=True)
class Denominators:
    """What a mini-batch is averaged over. Count each rank's share and add: the sum serves every shard alike."""

    sequences: float
    """Rows with at least one valid token."""
    tokens: float
    """Valid tokens."""
    length: float
    """The fixed length of ``seq-mean-token-sum-norm``: the number of columns, unless the user set one."""

    @classmethod
    def count(cls, mask: Tensor, length: float | None = None) -> Denominators:
        per_row = (mask != 0).sum(-1)
        columns = mask.shape[-1] if length is None else length
        return cls(float((per_row > 0).sum()), float(per_row.sum()), float(columns))

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(
            self.sequences + other.sequences, self.tokens + other.tokens, max(self.length, other.length)
        )


def aggregate(x: Tensor, mask: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """Reduces a ``[B, R]`` matrix to one number. With the whole mini-batch's denominators, shards' results add up to
    it.

    token-mean: ``sum(x m) / T``; seq-mean-token-sum: ``sum(x m) / B``; seq-mean-token-mean:
    ``sum_i(sum_t(x m) / |y_i|) / B``; seq-mean-token-sum-norm: ``sum(x m) / (B L)``; token-sum: ``sum(x m)``.
    A batch with nothing valid gives zero.
    """
    sequences, tokens = max(denominators.sequences, 1.0), max(denominators.tokens, 1.0)
    if mode == "seq-mean-token-mean":
        return masked_mean(x, mask, -1).sum() / sequences
    total = masked_sum(x, mask)
    if mode == "token-mean":
        return total / tokens
    if mode == "seq-mean-token-sum":
        return total / sequences
    if mode == "seq-mean-token-sum-norm":
        return total / (sequences * denominators.length)
    if mode == "token-sum":
        return total
    raise UserError(
        "no such way to aggregate a loss", key="loss_agg_mode", value=mode, fix=suggest(mode, list(AGGREGATIONS))
    )


def group_index(group: Tensor) -> tuple[Tensor, int]:
    """Each row's group as a number in ``0..G-1``, and G. Ids may be any integers, in any order."""
    ids, inverse = torch.unique(group, return_inverse=True)
    return inverse, len(ids)


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Per row, the sum of ``values`` over its group; summed in float64, so that order leaves no trace."""
    index, count = group_index(group)
    wide = values.double()
    return wide.new_zeros(count).index_add_(0, index, wide)[index].to(result_type(values))


def group_count(group: Tensor) -> Tensor:
    """Per row, the number of rows in its group (integers)."""
    index, count = group_index(group)
    return torch.bincount(index, minlength=count)[index]


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    return (group_sum(values.double(), group) / group_count(group)).to(result_type(values))


def group_std(values: Tensor, group: Tensor) -> Tensor:
    """Per row, the unbiased (n-1) standard deviation of its group; zero for a group of one."""
    wide = values.double()
    squares = group_sum((wide - group_mean(wide, group)).square(), group)
    return (squares / (group_count(group) - 1).clamp(min=1)).sqrt().to(result_type(values))


def result_type(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.get_default_dtype()
