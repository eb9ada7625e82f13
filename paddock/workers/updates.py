"""Plans of an update: which rows each optimizer step takes, and by what its sums are divided."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.config.roles import ActorConfig, ActorRolloutRefConfig, CriticConfig
from paddock.core.batch import Batch
from paddock.core.masked import Denominators
from paddock.core.rng import permutation

Metrics = dict[str, float]


@dataclass(frozen=True, eq=False)
class Mini:
    """The rows of one optimizer step, or one rank's share of them."""

    rows: Tensor
    """Positions in the batch at hand."""
    denominators: Denominators
    """Counts over the whole mini-batch, also if this rank holds a share of its rows."""


@dataclass(frozen=True)
class UpdatePlan:
    """What an update does with a batch. It is made of the whole batch, so that sharing its rows changes nothing."""

    minis: list[Mini]
    uses_old_log_probs: bool
    """True if the batch takes several optimizer steps, so that the loss must read `old_log_probs`; False: pi / pi_old
    is 1."""
    step: int


def mini_batches(rows: int, size: int, epochs: int, shuffle: bool, seed: int, step: int) -> Iterator[Tensor]:
    """Yields `epochs` passes over the rows, `size` at a time; shuffled by (seed, step, epoch) alone."""
    for epoch in range(epochs):
        order = permutation(rows, seed, step * epochs + epoch) if shuffle else torch.arange(rows)
        yield from order.split(size)


def plan_update(
    keys: ActorConfig | CriticConfig, samples: int, batch: Batch, step: int, length: float | None = None
) -> UpdatePlan:
    """Plans PPO epochs over mini-batches of `ppo_mini_batch_size` prompts with `samples` responses each."""
    size, mask = keys.ppo_mini_batch_size * samples, batch.need("mask")
    minis = mini_batches(len(batch), size, keys.ppo_epochs, keys.shuffle, keys.data_loader_seed, step)
    return UpdatePlan(
        [Mini(rows, Denominators.count(mask[rows], length)) for rows in minis],
        uses_old_log_probs=len(batch) > size or keys.ppo_epochs > 1,
        step=step,
    )


def actor_plan(group: ActorRolloutRefConfig, batch: Batch, step: int) -> UpdatePlan:
    return plan_update(group.actor, group.rollout.n, batch, step, group.actor.loss_scale_factor)


def one_step_plan(batch: Batch, step: int) -> UpdatePlan:
    """Plans one optimizer step over all rows."""
    mini = Mini(torch.arange(len(batch)), Denominators.count(batch.need("mask")))
    return UpdatePlan([mini], uses_old_log_probs=False, step=step)


class Average:
    """Means of metrics over the optimizer steps of one update."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, int] = defaultdict(int)

    def add(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.sums[name] += value
            self.counts[name] += 1

    def means(self) -> Metrics:
        return {name: total / self.counts[name] for name, total in self.sums.items()}
