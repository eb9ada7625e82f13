"""Reinforcement learning: `Trainer.step` is the algorithm. When it validates, saves and stops is in lifecycle.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paddock.algorithms.advantages import compute_advantages
from paddock.algorithms.correction import correct
from paddock.algorithms.kl import kl_controller, penalise
from paddock.algorithms.selection import resample
from paddock.config import rollout_correction, tree
from paddock.config.topology import (
    anchors_at_rollout,
    copies_rollout_log_probs,
    estimator_needs,
    learns_from_rewards,
    trusts_rollout,
)
from paddock.core.batch import GIVEN, Batch
from paddock.core.timing import Timer
from paddock.engines.train.base import EXPERT_COLUMNS
from paddock.errors import UserError
from paddock.models.adapters import MERGED
from paddock.rollouts.collect import Collector
from paddock.rollouts.window import to_tensors
from paddock.runs.samples import Sample, dump_samples, samples_of
from paddock.runs.settings import WHILE_PARTS_WAIT
from paddock.runs.tracking import Tracker
from paddock.trainer.assembly import Assembly
from paddock.trainer.lifecycle import Metrics, RunFolder, State, TrainingRun
from paddock.trainer.metrics import age_metrics, batch_metrics, signal_metrics
from paddock.trainer.performance import Performance
from paddock.trainer.validation import Validation
from paddock.workers.roles import Roles
from paddock.workers.updates import actor_plan, plan_update

log = logging.getLogger(__name__)


class Trainer(TrainingRun):
    """Trains a policy: generate -> score -> advantage -> update."""

    def __init__(
        self, parts: Assembly, roles: Roles, collector: Collector, validation: Validation | None, folder: RunFolder,
        total_steps: int,
    ):  # fmt: skip
        config, loader = parts.config, collector.loader
        super().__init__(config.trainer, tree.settings(config), loader, folder, total_steps, validation is not None)
        self.config = config
        self.parts, self.roles, self.collector, self.validation = parts, roles, collector, validation
        self.performance = Performance(config.actor_rollout_ref, config.critic, roles)
        self.kl = kl_controller(config.algorithm.kl_ctrl)
        self.correction = rollout_correction.parse(config.algorithm.rollout_correction)
        self.replays = config.actor_rollout_ref.actor.router_replay.mode
        self.needs = estimator_needs(config)
        self.copies_log_probs = copies_rollout_log_probs(config)
        self.runs_ahead = config.algorithm.staleness > 0
        if trusts_rollout(config):
            log.info("one update a step, and the actor samples: old log-probs are those of the rollout")
        if anchors_at_rollout(config):
            log.info("rollouts run ahead: old log-probs are those of the weights that drew each token")

    def step(self) -> tuple[Metrics, Batch]:
        """Takes one step: generate, score, compute advantages, update."""
        batch, metrics = self.collector.collect(self.step_no, self.timer, self.roles.generating)
        if self.runs_ahead:
            metrics |= age_metrics(batch, self.roles.actor.version, self.config.algorithm.staleness)
        batch, found = self.with_advantages(batch)
        metrics |= found | self.learn(batch, current=not self.runs_ahead)
        return metrics | self.describe(batch), batch

    def with_advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Computes what a scored batch lacks for an update: log-probs, values, rewards, weights and advantages."""
        time, roles, algorithm = self.timer, self.roles, self.config.algorithm
        with roles.forwarding():
            with time("old_log_prob"):
                batch = self.with_old_log_probs(batch)
            if roles.reference:
                with time("ref"):
                    batch = batch.with_(ref_log_probs=roles.reference.log_probs(batch))
            if roles.teachers:
                with time("teacher"):
                    batch = roles.teachers.scored(batch)
            if roles.critic:
                with time("values"):
                    batch = batch.with_(values=roles.critic.values(batch))
        with time("adv"):
            batch, kl_metrics = self.reward(batch)
            batch, correction_metrics = self.correct(batch)
            if learns_from_rewards(self.config):
                batch = compute_advantages(batch, algorithm)
            else:  # no loss reads them
                nothing = torch.zeros_like(batch.need("rewards"))
                batch = batch.with_(advantages=nothing, returns=nothing)
            if algorithm.use_pf_ppo:
                batch = resample(batch, algorithm.pf_ppo, self.config.trainer.seed, self.step_no)
        return batch, kl_metrics | correction_metrics

    def learn(self, batch: Batch, current: bool = True) -> Metrics:
        """Updates the critic, and once that is warm the actor, on a batch that has advantages.

        `current`: the weights that drew it are those that learn, so the first optimizer step needs no old log-probs.
        """
        time, roles, keys, metrics = self.timer, self.roles, self.config, Metrics()
        group = keys.actor_rollout_ref
        self.keep_rollouts(batch)
        if roles.critic:
            with time("update_critic"), self.updating():
                plan = plan_update(keys.critic, group.rollout.n, batch, self.step_no, keys.data.max_response_length)
                metrics |= roles.critic.learn(batch, plan)
        if self.step_no >= keys.trainer.critic_warmup:
            with time("update_actor"), self.updating():
                plan = actor_plan(group, batch, self.step_no)
                plan = plan if current else replace(plan, uses_old_log_probs=True)
                metrics |= roles.actor.learn(batch, plan)
        return metrics

    def completed(self, batch: Batch) -> Batch:
        """Fills what an update and its metrics read, for a batch with advantages that no estimator made."""
        if batch.advantages is None:
            fix = "learn(run.advantages(batch)), or batch.with_(advantages=...) with a number per token"
            raise UserError("the batch has no advantages", key="batch", fix=fix)
        if batch.rewards is None:
            batch = batch.with_(rewards=batch.scores)
        if batch.returns is None and self.roles.critic is None:
            batch = batch.with_(returns=batch.advantages)
        return self.with_old_log_probs(batch) if batch.old_log_probs is None else batch

    def publish(self) -> Metrics:
        """Gives the rollout engines the new weights, if the actor was trained."""
        if self.step_no < self.config.trainer.critic_warmup:
            return {}
        with self.timer("update_weights"):
            return self.roles.rollout.publish()

    def with_old_log_probs(self, batch: Batch) -> Batch:
        """Fills `old_log_probs`: copies those of the rollout in bypass mode or if they are the same, else computes.
        Tokens that a program gave keep the log-probs that it gave with them: another policy wrote them."""
        if self.copies_log_probs:
            batch = batch.with_(old_log_probs=batch.need("rollout_log_probs"))
            if "sum_pi_squared" not in self.needs:
                return batch
            found = self.roles.actor.forward(batch, frozenset({"sum_pi_squared"}))
            return batch.with_(sum_pi_squared=found.sum_pi_squared)
        want = {"log_probs", "sum_pi_squared"} if "sum_pi_squared" in self.needs else {"log_probs"}
        if self.replays == "R2":
            want |= EXPERT_COLUMNS
            batch = batch.with_(prompt_experts=None, response_experts=None)  # the rollout's, if it recorded any
        outputs = self.roles.actor.forward(batch, frozenset(want))
        others = {name: getattr(outputs, name) for name in want - {"log_probs"}}
        batch = batch.with_(old_log_probs=outputs.log_probs, **others)
        if batch.versions is None or not (given := batch.versions == GIVEN).any():
            return batch
        own, computed = batch.need("rollout_log_probs"), batch.need("old_log_probs")
        return batch.with_(old_log_probs=torch.where(given, own, computed))

    def reward(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Fills ``rewards = scores - beta KL(policy | reference)``; the scores alone if the KL has no weight."""
        if self.config.algorithm.use_kl_in_reward and self.roles.reference:
            return penalise(batch, self.config.algorithm.kl_penalty, self.kl)
        return batch.with_(rewards=batch.need("scores")), {}

    def correct(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Adds importance weights and rejects samples that another policy drew; in bypass mode the loss does it."""
        if self.copies_log_probs:
            return batch, {}
        return correct(batch, self.correction)

    def describe(self, batch: Batch) -> Metrics:
        """Returns the batch metrics; without the trainer-rollout gap if `old_log_probs` was copied from the rollout."""
        data = self.config.data
        if self.copies_log_probs:
            batch = batch.with_(old_log_probs=None)
        epoch = {"training/global_step": float(self.step_no), "training/epoch": float(self.loader.epoch)}
        use_critic = self.roles.critic is not None
        found = batch_metrics(batch, data.max_prompt_length, data.max_response_length, use_critic)
        return epoch | found | (signal_metrics(batch) if learns_from_rewards(self.config) else {})

    def validate(self, tracker: Tracker) -> Metrics:
        assert self.validation is not None
        with self.roles.rollout.awake(self.timer):
            metrics, samples = self.validation.run(self.step_no, self.timer)
        self.lock.require()
        tracker.generations(self.step_no, samples)
        return metrics

    @contextmanager
    def apart(self) -> Iterator[Timer]:
        """Lets the rollout answer in the block what is no part of a step, and gives it another timer."""
        timer = Timer()
        with self.roles.rollout.awake(timer):
            yield timer

    def validation_on(self, files: list[str]) -> Validation:
        """Returns a validation on the rows of other files."""
        return Validation(self.collector, self.parts.held_out(files))

    def keep_rollouts(self, batch: Batch) -> None:
        folder = self.config.trainer.rollout_data_dir
        if folder:
            with self.timer("dump_rollout_generations"):
                dump_samples(folder, self.step_no, self.samples(batch), "trainer.rollout_data_dir")

    def devices(self) -> str:
        return f"{self.roles.devices} x {self.performance.device_name}"

    def samples(self, batch: Batch) -> list[Sample]:
        return samples_of(batch, self.collector.tokenizer)

    def rows_of(self, batch: Batch) -> str:
        folder = Path(self.config.trainer.default_local_dir) / "nonfinite"
        path = dump_samples(folder, self.step_no, self.samples(batch), "trainer.default_local_dir")
        return f"the rows of the last are in {path}"

    def cost(self, batch: Batch) -> Metrics:
        return self.performance.metrics(batch, self.timer)

    def state(self) -> State:
        window = self.collector.window.state()
        return super().state() | {"kl": self.kl.state_dict(), "version": self.roles.actor.version, "window": window}

    def kept(self, state: State) -> State:
        window = state["window"]
        begun = to_tensors(window["begun"])
        return state | {"window": window["batches"], "begun": begun, "decided": window["decided"]}

    def fixed(self, state: State) -> Mapping[str, str]:
        return {**super().fixed(state), **(WHILE_PARTS_WAIT if state.get("window") else {})}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self.kl.load_state_dict(state["kl"])
        if state.get("window"):
            self.collector.window.load_state(state["window"], state["begun"], state.get("decided", {}))

    def save_weights(self, folder: Path) -> None:
        for name, role in self.trained().items():
            (folder / name).mkdir()
            role.save(folder / name)
        for weights in (folder / "actor", folder / "actor" / MERGED):
            if weights.is_dir():
                self.loader.dataset.prompts.save(weights)

    def load_weights(self, folder: Path, state: State) -> None:
        for name, role in self.trained().items():
            role.load(folder / name, state.get("version", 0))

    def trained(self) -> dict[str, Any]:
        roles = {"actor": self.roles.actor, "critic": self.roles.critic}
        return {name: role for name, role in roles.items() if role is not None}
