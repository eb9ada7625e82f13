"""What a role does with its engine: forward passes and updates of policy and critic, mini-batch by mini-batch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paddock.algorithms.losses import POLICY_LOSS, LossInputs, policy_loss_terms, value_loss, wanted_columns
from paddock.algorithms.rollout_gap import gap_metrics, gap_shares
from paddock.config import rollout_correction
from paddock.config.roles import ActorConfig, CriticConfig
from paddock.config.schema import Config
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.masked import Denominators
from paddock.core.rng import permutation
from paddock.engines.train.base import LossFn, Outputs, TrainEngine, Want

Metrics = dict[str, float]


@dataclass(frozen=True, eq=False)
class Mini:
    """The rows of one optimizer step, or one worker's share of them."""

    rows: Tensor
    """Positions in the batch at hand."""
    denominators: Denominators
    """Of the whole mini-batch, whoever has its rows."""


@dataclass(frozen=True)
class UpdatePlan:
    """What an update does with a batch. It is made of the whole batch, so that sharing its rows changes nothing."""

    minis: list[Mini]
    anchored: bool
    """Whether the policy moves between its old log-probs and a gradient; else it is its own anchor: the ratio is 1."""
    step: int


def mini_batches(rows: int, size: int, epochs: int, shuffle: bool, seed: int, step: int) -> Iterator[Tensor]:
    """`epochs` passes over the rows, `size` at a time; shuffled by (seed, step, epoch) alone."""
    for epoch in range(epochs):
        order = permutation(rows, seed, step * epochs + epoch) if shuffle else torch.arange(rows)
        yield from order.split(size)


def plan_update(
    keys: ActorConfig | CriticConfig, samples: int, batch: Batch, step: int, length: float | None = None
) -> UpdatePlan:
    """PPO epochs over mini-batches of `ppo_mini_batch_size` prompts with `samples` responses each."""
    size, mask = keys.ppo_mini_batch_size * samples, batch.need("mask")
    minis = mini_batches(len(batch), size, keys.ppo_epochs, keys.shuffle, keys.data_loader_seed, step)
    return UpdatePlan(
        [Mini(rows, Denominators.count(mask[rows], length)) for rows in minis],
        anchored=len(batch) > size or keys.ppo_epochs > 1,
        step=step,
    )


def actor_plan(config: Config, batch: Batch, step: int) -> UpdatePlan:
    group = config.actor_rollout_ref
    return plan_update(group.actor, group.rollout.n, batch, step, group.actor.loss_scale_factor)


def critic_plan(config: Config, batch: Batch, step: int) -> UpdatePlan:
    return plan_update(config.critic, config.actor_rollout_ref.rollout.n, batch, step)


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


class Worker:
    """A role and its engine."""

    name: str

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @contextmanager
    def present(self) -> Iterator[None]:
        """On the device for the time of the block, where the role's offload keys let it leave in between."""
        self.engine.move("device")
        try:
            yield
        finally:
            self.engine.move("host")

    def forward(self, batch: Batch, want: Want) -> Outputs:
        with self.present():
            return self.engine.forward(batch, want)

    def learn(
        self, batch: Batch, minis: list[Mini], loss_of: Callable[[Batch, Denominators], LossFn], want: Want
    ) -> Metrics:
        """One optimizer step for each mini-batch; means of their metrics."""
        seen = Average()
        with self.present():
            for mini in minis:
                rows = batch.rows(mini.rows)
                loss = loss_of(rows, mini.denominators)
                totals = self.engine.train_step(self.engine.micro_batches(rows), loss, want)
                metrics = gap_metrics(totals, mini.denominators.tokens)
                seen.add({name if "/" in name else f"{self.name}/{name}": value for name, value in metrics.items()})
        return seen.means()

    def save(self, path: Path) -> None:
        self.engine.save(path)

    def load(self, path: Path) -> None:
        self.engine.load(path)


class PolicyWorker(Worker):
    """The actor, or a frozen reference."""

    name = "actor"

    def __init__(self, engine: TrainEngine, config: Config):
        super().__init__(engine)
        self.config = config
        self.actor = loss_settings(config)

    def log_probs(self, batch: Batch) -> PerToken:
        found = self.forward(batch, frozenset({"log_probs"})).log_probs
        assert found is not None
        return found

    def update(self, batch: Batch, step: int) -> Metrics:
        return self.carry_out(batch, actor_plan(self.config, batch, step))

    def carry_out(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        def loss_of(mini: Batch, denominators: Denominators) -> LossFn:
            return self._loss(mini, denominators, plan.anchored, plan.step)

        return self.learn(batch, plan.minis, loss_of, wanted_columns(self.actor))

    def _loss(self, mini: Batch, denominators: Denominators, anchored: bool, step: int) -> LossFn:
        selected = self._selection(mini, anchored, step)

        def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
            assert outputs.log_probs is not None
            inputs = loss_inputs(
                micro, outputs.log_probs, anchored, None if selected is None else selected[places(mini.row, micro.row)]
            )
            total, metrics = policy_loss_terms(inputs, self.actor, denominators, outputs.entropy, micro.ref_log_probs)
            if micro.rollout_log_probs is not None and not anchored:
                metrics |= gap_shares(outputs.log_probs, micro.rollout_log_probs, micro.need("mask"), denominators)
            return total, metrics

        return loss

    def _selection(self, mini: Batch, anchored: bool, step: int) -> PerToken | None:
        """Some losses choose tokens by statistics of the whole mini-batch, which takes a pass without gradient."""
        chosen = POLICY_LOSS.get(self.actor.policy_loss.loss_mode)
        if not chosen.needs_selection(self.actor):
            return None
        log_probs = self.engine.forward(mini, frozenset({"log_probs"})).log_probs
        assert log_probs is not None
        whole = joined(self.engine.everyones(loss_inputs(mini, log_probs, anchored, None)))
        selected = chosen.choose(whole, self.actor, self.config.trainer.seed, step)
        assert selected is not None and whole.rows is not None
        return selected if len(selected) == len(mini) else selected[places(whole.rows, mini.row)]


def loss_settings(config: Config) -> Any:
    """The actor's keys as its loss reads them: in bypass mode the loss corrects for the rollout policy itself."""
    actor, plan = (
        copy.copy(config.actor_rollout_ref.actor),
        rollout_correction.parse(config.algorithm.rollout_correction),
    )
    if plan.bypass:
        chosen = {**vars(actor.policy_loss), "loss_mode": "bypass_mode", "rollout_correction": plan}
        actor.policy_loss = SimpleNamespace(**chosen)  # type: ignore[assignment]
    return actor


def loss_inputs(batch: Batch, log_probs: PerToken, anchored: bool, selected: PerToken | None) -> LossInputs:
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=batch.need("old_log_probs") if anchored else log_probs.detach(),
        advantages=batch.need("advantages"),
        mask=batch.need("mask"),
        weights=batch.weights,
        rollout_log_probs=batch.rollout_log_probs,
        selected=selected,
        rows=batch.row,
    )


def joined(shares: list[LossInputs]) -> LossInputs:
    """The inputs of all ranks, rank after rank."""
    if len(shares) == 1:
        return shares[0]
    columns: dict[str, Any] = {
        field.name: torch.cat([getattr(share, field.name) for share in shares])
        for field in fields(LossInputs)
        if isinstance(getattr(shares[0], field.name), Tensor)
    }
    return LossInputs(**columns)


def places(rows: PerRow, wanted: PerRow) -> Tensor:
    """Where the wanted ids stand among the rows."""
    place = {row: index for index, row in enumerate(rows.tolist())}
    return torch.tensor([place[row] for row in wanted.tolist()], dtype=torch.long, device=rows.device)


class CriticWorker(Worker):
    """The value model."""

    name = "critic"

    def __init__(self, engine: TrainEngine, config: Config):
        super().__init__(engine)
        self.config = config

    def values(self, batch: Batch) -> PerToken:
        found = self.forward(batch, frozenset({"values"})).values
        assert found is not None
        return found

    def update(self, batch: Batch, step: int) -> Metrics:
        return self.carry_out(batch, critic_plan(self.config, batch, step))

    def carry_out(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        return self.learn(batch, plan.minis, self._loss, frozenset({"values"}))

    def _loss(self, mini: Batch, denominators: Denominators) -> LossFn:
        def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
            assert outputs.values is not None
            old, returns, mask = micro.need("values"), micro.need("returns"), micro.need("mask")
            return value_loss(outputs.values, old, returns, mask, self.config.critic, denominators)

        return loss
