"""What a role does with its engine: forward passes and updates of policy and critic, mini-batch by mini-batch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paddock.algorithms.losses import POLICY_LOSS, LossInputs, policy_loss_terms, value_loss
from paddock.config import rollout_correction
from paddock.config.schema import Config
from paddock.core.batch import Batch, PerToken
from paddock.core.masked import Denominators, aggregate
from paddock.core.rng import permutation
from paddock.engines.train.base import LossFn, Outputs, TrainEngine, Want

Metrics = dict[str, float]


def mini_batches(batch: Batch, rows: int, epochs: int, shuffle: bool, seed: int, step: int) -> Iterator[Batch]:
    """`epochs` passes over the batch, `rows` at a time; shuffled by (seed, step, epoch) alone."""
    for epoch in range(epochs):
        order = permutation(len(batch), seed, step * epochs + epoch) if shuffle else torch.arange(len(batch))
        for part in order.split(rows):
            yield batch.rows(part)


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

    def learn(self, minis: Iterator[Batch], loss_of: Callable[[Batch], LossFn], want: Want) -> Metrics:
        """One optimizer step for each mini-batch; means of their metrics."""
        seen = Average()
        with self.present():
            for mini in minis:
                metrics = self.engine.train_step(self.engine.micro_batches(mini), loss_of(mini), want)
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
        self.rows = self.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n

    def log_probs(self, batch: Batch) -> PerToken:
        found = self.forward(batch, frozenset({"log_probs"})).log_probs
        assert found is not None
        return found

    def update(self, batch: Batch, step: int) -> Metrics:
        """PPO epochs over mini-batches. With a single optimizer step the policy is its own anchor: the ratio is 1."""
        keys = self.actor
        anchored = len(batch) > self.rows or keys.ppo_epochs > 1
        minis = mini_batches(batch, self.rows, keys.ppo_epochs, keys.shuffle, keys.data_loader_seed, step)
        return self.learn(minis, lambda mini: self._loss(mini, anchored, step), frozenset({"log_probs", "entropy"}))

    def _loss(self, mini: Batch, anchored: bool, step: int) -> LossFn:
        denominators = Denominators.count(mini.need("mask"), self.actor.loss_scale_factor)
        selected = self._selection(mini, anchored, step)

        def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
            assert outputs.log_probs is not None
            inputs = loss_inputs(
                micro, outputs.log_probs, anchored, None if selected is None else selected[micro_index(mini, micro)]
            )
            total, metrics = policy_loss_terms(inputs, self.actor, denominators, outputs.entropy, micro.ref_log_probs)
            if micro.rollout_log_probs is not None and not anchored:
                gap = (outputs.log_probs.detach().exp() - micro.rollout_log_probs.exp()).abs()
                metrics["training/rollout_probs_diff_mean"] = aggregate(
                    gap, micro.need("mask"), "token-mean", denominators
                )
            return total, metrics

        return loss

    def _selection(self, mini: Batch, anchored: bool, step: int) -> PerToken | None:
        """Some losses choose tokens by statistics of the whole mini-batch, which takes a pass without gradient."""
        chosen = POLICY_LOSS.get(self.actor.policy_loss.loss_mode)
        if not chosen.needs_selection(self.actor):
            return None
        log_probs = self.engine.forward(mini, frozenset({"log_probs"})).log_probs
        assert log_probs is not None
        return chosen.choose(loss_inputs(mini, log_probs, anchored, None), self.actor, self.config.trainer.seed, step)


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


def micro_index(mini: Batch, micro: Batch) -> Tensor:
    """Where the micro-batch's rows stand in the mini-batch."""
    place = {row: index for index, row in enumerate(mini.row.tolist())}
    return torch.tensor([place[row] for row in micro.row.tolist()], dtype=torch.long, device=mini.row.device)


class CriticWorker(Worker):
    """The value model."""

    name = "critic"

    def __init__(self, engine: TrainEngine, config: Config):
        super().__init__(engine)
        self.critic = config.critic
        self.rows = config.critic.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n

    def values(self, batch: Batch) -> PerToken:
        found = self.forward(batch, frozenset({"values"})).values
        assert found is not None
        return found

    def update(self, batch: Batch, step: int) -> Metrics:
        keys = self.critic
        minis = mini_batches(batch, self.rows, keys.ppo_epochs, keys.shuffle, keys.data_loader_seed, step)
        return self.learn(minis, self._loss, frozenset({"values"}))

    def _loss(self, mini: Batch) -> LossFn:
        denominators = Denominators.count(mini.need("mask"))

        def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
            assert outputs.values is not None
            old, returns, mask = micro.need("values"), micro.need("returns"), micro.need("mask")
            return value_loss(outputs.values, old, returns, mask, self.critic, denominators)

        return loss
