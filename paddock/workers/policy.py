"""The policy (the actor that is trained, or a frozen model: the reference, a teacher) and its critic."""

from __future__ import annotations

import copy
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from paddock.algorithms.distillation import Taught, distillation_terms, wanted_of_student
from paddock.algorithms.losses import POLICY_LOSS, LossInputs, policy_loss_terms, value_loss, wanted_columns
from paddock.algorithms.rollout_gap import gap_shares, lag_shares
from paddock.config import rollout_correction
from paddock.config.distillation import DistillationConfig
from paddock.config.roles import CriticConfig
from paddock.config.schema import AlgorithmConfig
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.masked import aggregate
from paddock.engines.rollout.base import EngineConfig
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.workers.role import MiniBatch, TrainedRole
from paddock.workers.updates import UpdatePlan


class LossConfig(EngineConfig, Protocol):
    """The sections of a config that the actor's loss reads: those of its rollout engine, and two more."""

    algorithm: AlgorithmConfig
    distillation: DistillationConfig


class Policy(TrainedRole):
    """A language model that gives log-probs; the actor is also updated."""

    def __init__(self, engine: Engine, config: LossConfig, name: str = "actor"):
        super().__init__(engine, name)
        self.seed = config.trainer.seed
        self.loss_keys = loss_settings(config)
        self.wants = wanted_columns(self.loss_keys)
        corrects = rollout_correction.parse(config.algorithm.rollout_correction).active
        self.tells_lag = config.algorithm.staleness > 0 and not corrects
        self.teaching = config.distillation.distillation_loss if config.distillation.enabled else None
        self.learns_from_rewards = self.teaching is None or self.teaching.use_task_rewards
        if self.teaching:
            self.wants |= wanted_of_student(self.teaching)

    def log_probs(self, batch: Batch) -> PerToken:
        return self.forward(batch, frozenset({"log_probs"})).need("log_probs")

    def loss(self, mini: MiniBatch, micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, selected = outputs.need("log_probs"), None
        if mini.selected is not None:  # it was found on the host, where the rows of the mini-batch are
            selected = mini.selected[indices_of(micro.row, mini.rows)].to(log_probs.device)
        inputs = loss_inputs(micro, log_probs, mini.uses_old_log_probs, selected)
        if self.learns_from_rewards:
            total, metrics = policy_loss_terms(
                inputs, self.loss_keys, mini.denominators, outputs.entropy, micro.ref_log_probs
            )
        else:
            total, metrics = log_probs.new_zeros(()), {}
            if outputs.entropy is not None:
                entropy = aggregate(outputs.entropy.detach(), inputs.mask, "token-mean", mini.denominators)
                metrics["actor/entropy"] = entropy
        if self.teaching:
            taught = Taught(
                micro.teacher_log_probs, micro.teacher_topk_log_probs, outputs.choice_log_probs, outputs.kth_log_probs
            )
            share, found = distillation_terms(inputs, taught, self.teaching, self.loss_keys, mini.denominators)
            total = total + share * (self.teaching.distillation_loss_coef if self.learns_from_rewards else 1.0)
            metrics |= found
        if micro.rollout_log_probs is not None and not mini.uses_old_log_probs:
            metrics |= gap_shares(log_probs, micro.rollout_log_probs, micro.need("mask"), mini.denominators)
        if self.tells_lag:
            metrics |= lag_shares(log_probs, micro.need("rollout_log_probs"), micro.need("mask"), mini.denominators)
        return total, metrics

    def select(self, rows: Batch, plan: UpdatePlan) -> PerToken | None:
        """Runs a pass without gradient, if the loss chooses tokens by statistics of the whole mini-batch."""
        loss = POLICY_LOSS.get(self.loss_keys.policy_loss.loss_mode)
        if not self.learns_from_rewards or not loss.needs_selection(self.loss_keys):
            return None
        log_probs = self.engine.forward(rows, frozenset({"log_probs"})).need("log_probs")
        whole = joined(self.engine.everyones(loss_inputs(rows, log_probs, plan.uses_old_log_probs)))
        selected = loss.choose(whole, self.loss_keys, self.seed, plan.step)
        assert selected is not None and whole.rows is not None
        return selected if len(selected) == len(rows) else selected[indices_of(rows.row, whole.rows)]


class Critic(TrainedRole):
    """A value model that is trained beside the actor: one number per token."""

    wants = frozenset({"values"})

    def __init__(self, engine: Engine, keys: CriticConfig):
        super().__init__(engine, "critic")
        self.keys = keys

    def values(self, batch: Batch) -> PerToken:
        return self.forward(batch, self.wants).need("values")

    def loss(self, mini: MiniBatch, micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        old, returns, mask = micro.need("values"), micro.need("returns"), micro.need("mask")
        return value_loss(outputs.need("values"), old, returns, mask, self.keys, mini.denominators)


def loss_settings(config: LossConfig) -> Any:
    """Returns the actor's keys as its loss reads them: in bypass mode the loss corrects for the rollout policy."""
    actor = copy.copy(config.actor_rollout_ref.actor)
    plan = rollout_correction.parse(config.algorithm.rollout_correction)
    if plan.bypass:
        chosen = {**vars(actor.policy_loss), "loss_mode": "bypass_mode", "rollout_correction": plan}
        actor.policy_loss = SimpleNamespace(**chosen)  # type: ignore[assignment]
    return actor


def loss_inputs(
    batch: Batch, log_probs: PerToken, uses_old_log_probs: bool, selected: PerToken | None = None
) -> LossInputs:
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=batch.need("old_log_probs") if uses_old_log_probs else log_probs.detach(),
        advantages=batch.need("advantages"),
        mask=batch.need("mask"),
        weights=batch.weights,
        rollout_log_probs=batch.rollout_log_probs,
        selected=selected,
        rows=batch.row,
    )


def joined(shares: list[LossInputs]) -> LossInputs:
    """Concatenates the inputs of all ranks, rank after rank."""
    if len(shares) == 1:
        return shares[0]
    columns: dict[str, Any] = {
        field.name: torch.cat([getattr(share, field.name) for share in shares])
        for field in fields(LossInputs)
        if isinstance(getattr(shares[0], field.name), Tensor)
    }
    return LossInputs(**columns)


def indices_of(wanted: PerRow, rows: PerRow) -> Tensor:
    """Returns the index of each wanted row id among `rows`."""
    index = {row: number for number, row in enumerate(rows.tolist())}
    return torch.tensor([index[row] for row in wanted.tolist()], dtype=torch.long, device=rows.device)
