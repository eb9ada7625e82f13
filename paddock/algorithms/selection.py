"""Which responses are learnt from: informative groups, bounded length, resampling by score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paddock.core.batch import Batch, PerRow
from paddock.core.masked import group_index
from paddock.core.registry import suggest
from paddock.core.rng import Stream, uniform
from paddock.errors import UserError


def group_metric(batch: Batch, name: str) -> PerRow:
    """The column ``algorithm.filter_groups.metric`` names: a sum over the response's tokens, or one of the extras.

    Where groups are filtered no KL penalty is known yet, and rewards are the scores."""
    if name == "seq_reward" or (name == "seq_final_reward" and batch.rewards is None):
        return batch.need("scores").sum(-1)
    if name == "seq_final_reward":
        return batch.need("rewards").sum(-1)
    if name not in batch.extras:
        known = suggest(name, ["seq_reward", "seq_final_reward", *batch.extras])
        raise UserError("the scorer gave no such value", key="algorithm.filter_groups.metric", value=name, fix=known)
    return batch.numbers(name)


def informative_groups(batch: Batch, metric: PerRow) -> Tensor:
    """True on rows of groups whose metric differs between responses; a group of one cannot tell and stays.

    Where all responses fare alike the group's advantages are zero: DAPO's dynamic sampling drops it. arXiv:2503.14476
    """
    index, count = group_index(batch.group)
    empty = metric.new_zeros(count)
    highest = empty.scatter_reduce(0, index, metric, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, index, metric, "amin", include_self=False)
    alone = torch.bincount(index, minlength=count) == 1
    return ((highest > lowest) | alone)[index]


class GroupBuffer:
    """Collects informative groups over rounds of generation until there are enough for a step.

    >>> buffer = GroupBuffer(needed=config.train_batch_size, max_rounds=config.filter_groups.max_num_gen_batches)
    >>> while not buffer.full:
    ...     buffer.add(generated, metric)
    >>> batch = buffer.take()
    """

    def __init__(self, needed: int, max_rounds: int):
        self.needed = needed
        self.max_rounds = max_rounds
        self.rounds = 0
        self.groups: set[int] = set()
        self._kept: list[Batch] = []

    @property
    def full(self) -> bool:
        return len(self.groups) >= self.needed

    def add(self, batch: Batch, metric: PerRow) -> None:
        """Keeps the batch's informative groups; a UserError if the rounds are spent and groups still lack."""
        self.rounds += 1
        kept = batch.rows(informative_groups(batch, metric))
        found = set(kept.group.tolist())
        if found & self.groups:
            raise ValueError("a group id comes back in a later round: a prompt drawn again needs a new one")
        self.groups |= found
        self._kept.append(kept)
        if not self.full and 0 < self.max_rounds <= self.rounds:
            raise UserError(
                f"{self.rounds} rounds of generation gave {len(self.groups)} of {self.needed} informative groups",
                key="algorithm.filter_groups.max_num_gen_batches",
                value=self.max_rounds,
                fix="raise it (0: no limit), sample more responses per prompt, or use prompts it sometimes solves",
            )

    def take(self) -> Batch:
        """Returns the first ``needed`` groups to arrive, whole; the others stay."""
        batch = Batch.concat(self._kept)
        arrival = list(dict.fromkeys(batch.group.tolist()))
        taken = torch.isin(batch.group, torch.tensor(arrival[: self.needed], dtype=batch.group.dtype))
        self._kept = [] if taken.all() else [batch.rows(~taken)]
        self.groups, self.rounds = set(arrival[self.needed :]), 0
        return batch.rows(taken)


def overlong_penalty(lengths: PerRow, longest: int, buffer: int, factor: float) -> PerRow:
    """Penalises long responses: ``min(0, -(|y| - (L_max - L_buf)) / L_buf factor)``.  DAPO, arXiv:2503.14476"""
    if not 0 < buffer <= longest:
        raise UserError(
            f"must lie between 1 and the longest response, {longest} tokens",
            key="overlong_buffer.len",
            value=buffer,
            fix="choose a part of data.max_response_length",
        )
    excess = lengths.to(torch.float32) - (longest - buffer)
    return (-excess / buffer * factor).clamp(max=0)


def resampling_weights(scores: PerRow, method: str, power: float) -> PerRow:
    """PF-PPO's preference for rows whose score says something.  arXiv:2409.06957"""
    if method == "pow":
        return scores.abs() ** power
    if method == "max_min":
        return ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    if method == "max_random":
        return torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype)
    known = suggest(method, ["pow", "max_min", "max_random"])
    raise UserError("there is no such method", key="algorithm.pf_ppo.reweight_method", value=method, fix=known)


def resample(batch: Batch, config: Any, seed: int, step: int) -> Batch:
    """PF-PPO: as many rows, drawn with replacement, with probability proportional to weight + 1e-8, and new row ids.

    ``config`` is ``algorithm.pf_ppo``. The draw depends on row ids, not on their order in the batch.
    """
    batch = batch.rows(batch.row.argsort())
    weights = resampling_weights(batch.need("scores").sum(-1), config.reweight_method, config.weight_pow)
    ladder = (weights.double() + 1e-8).cumsum(0)
    draws = uniform(seed, step, batch.row, stream=Stream.RESAMPLE) * ladder[-1]
    drawn = torch.searchsorted(ladder, draws, right=True).clamp(max=len(batch) - 1)
    return batch.rows(drawn).with_(row=torch.arange(len(batch), device=batch.row.device))
