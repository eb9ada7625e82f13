"""The training loop. `Trainer.step` is the algorithm; `fit` decides when to validate, save and stop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from paddock.algorithms.advantages import compute_advantages
from paddock.algorithms.correction import correct
from paddock.algorithms.kl import kl_controller, penalise
from paddock.algorithms.selection import resample
from paddock.config import rollout_correction
from paddock.config.recipes import recipe_of
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.timing import Timer
from paddock.engines.train.base import EXPERT_COLUMNS
from paddock.errors import UserError
from paddock.models.adapters import MERGED
from paddock.trainer.checkpoint import Checkpoint, CheckpointStore
from paddock.trainer.experience import Experience
from paddock.trainer.interruption import Interruption
from paddock.trainer.metrics import batch_metrics
from paddock.trainer.performance import Performance
from paddock.trainer.samples import Sample, dump_samples, samples_of
from paddock.trainer.state import check_config, flat, load_state, restore_rng, rng_state, save_state
from paddock.trainer.tracking import Tracker
from paddock.trainer.validation import Validation
from paddock.workers.roles import Roles

log = logging.getLogger(__name__)

Metrics = dict[str, float]


class Trainer:
    """One run: generate -> score -> advantage -> update, until its steps are done or someone stops it."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        experience: Experience,
        validation: Validation | None,
        store: CheckpointStore,
        total_steps: int,
    ):
        self.config, self.roles, self.experience, self.validation = config, roles, experience, validation
        self.store, self.total_steps = store, total_steps
        self.step_no = 0
        self.timer, self.performance = Timer(), Performance(config, roles)
        self.kl = kl_controller(config.algorithm.kl_ctrl)
        self.correction = rollout_correction.parse(config.algorithm.rollout_correction)
        self.replays = config.actor_rollout_ref.actor.router_replay.mode
        recipe = recipe_of(config.algorithm.adv_estimator)
        self.needs = recipe.needs if recipe else frozenset()
        self.trusts_rollout = self.can_trust_rollout()
        if self.trusts_rollout:
            log.info("one update a step, and the actor samples: old log-probs are those of the rollout")
        self.void_updates = 0  # in a row

    def step(self) -> tuple[Metrics, Batch]:
        """One policy improvement."""
        time, roles, algorithm = self.timer, self.roles, self.config.algorithm
        with roles.generating(time):
            batch, metrics = self.experience.collect(self.step_no, time, roles.expect_reference)
        with time("old_log_prob"):
            batch = self.anchor(batch)
        if roles.reference:
            with time("ref"):
                batch = batch.with_(ref_log_probs=roles.reference.log_probs(batch))
        if roles.critic:
            with time("values"):
                batch = batch.with_(values=roles.critic.values(batch))
        if not roles.critic:  # whose update would share the device with it
            roles.actor.expect()
        with time("adv"):
            batch, kl_metrics = self.reward(batch)
            batch, correction_metrics = self.correct(batch)
            batch = compute_advantages(batch, algorithm)
            if algorithm.use_pf_ppo:
                batch = resample(batch, algorithm.pf_ppo, self.config.trainer.seed, self.step_no)
        metrics |= kl_metrics | correction_metrics
        if roles.critic:
            with time("update_critic"):
                metrics |= roles.critic.update(batch, self.step_no)
        if self.step_no >= self.config.trainer.critic_warmup:
            with time("update_actor"):
                metrics |= roles.actor.update(batch, self.step_no)
            with time("update_weights"):
                metrics |= roles.sync_weights()
        return metrics | self.describe(batch), batch

    def anchor(self, batch: Batch) -> Batch:
        """Log-probs of the policy that the update starts from: the engine's where they are as good, else computed."""
        if self.correction.bypass or self.trusts_rollout:
            return batch.with_(old_log_probs=batch.need("rollout_log_probs"))
        want = {"log_probs", "sum_pi_squared"} if "sum_pi_squared" in self.needs else {"log_probs"}
        if self.replays == "R2":
            want |= EXPERT_COLUMNS
            batch = batch.with_(prompt_experts=None, response_experts=None)  # the rollout's, if it recorded any
        outputs = self.roles.actor.forward(batch, frozenset(want))
        others = {name: getattr(outputs, name) for name in want - {"log_probs"}}
        return batch.with_(old_log_probs=outputs.log_probs, **others)

    def can_trust_rollout(self) -> bool:
        """With one optimizer step, and the actor's own modules sampling, computing them again changes nothing."""
        group, data = self.config.actor_rollout_ref, self.config.data
        one_update = group.actor.ppo_mini_batch_size == data.train_batch_size and group.actor.ppo_epochs == 1
        same_numbers = group.rollout.name == "embedded" and "sum_pi_squared" not in self.needs
        return one_update and same_numbers and not self.correction.active and self.replays != "R2"

    def reward(self, batch: Batch) -> tuple[Batch, Metrics]:
        """rewards = scores - beta KL(policy | reference), where that has a weight."""
        if self.config.algorithm.use_kl_in_reward and self.roles.reference:
            return penalise(batch, self.config.algorithm.kl_penalty, self.kl)
        return batch.with_(rewards=batch.need("scores")), {}

    def correct(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Weights and rejections for samples that another policy drew; in bypass mode the loss does it."""
        if self.correction.bypass or self.trusts_rollout:
            return batch, {}
        return correct(batch, self.correction)

    def describe(self, batch: Batch) -> Metrics:
        """Log-probs that are the rollout's own say nothing about how far trainer and rollout are apart."""
        data = self.config.data
        if self.correction.bypass or self.trusts_rollout:
            batch = batch.with_(old_log_probs=None)
        epoch = {"training/global_step": float(self.step_no), "training/epoch": float(self.experience.loader.epoch)}
        use_critic = self.roles.critic is not None
        return epoch | batch_metrics(batch, data.max_prompt_length, data.max_response_length, use_critic)

    def fit(self, tracker: Tracker) -> bool:
        """All steps that are left; False if it was interrupted, with a checkpoint of where it stands."""
        trainer = self.config.trainer
        if self.step_no == 0 and self.validation and (trainer.val_before_train or trainer.val_only):
            tracker.log(0, self.validate(tracker))
            self.timer.reset()
        if trainer.val_only:
            return True
        with Interruption() as interruption:
            while self.step_no < self.total_steps and not interruption.asked:
                self.step_no += 1
                self.advance(tracker, last=self.step_no == self.total_steps or interruption.asked)
        if interruption.asked and self.step_no < self.total_steps:
            self.save(tracker)
            return False
        return True

    def advance(self, tracker: Tracker, last: bool) -> None:
        """One step, and what its number calls for."""
        trainer = self.config.trainer
        with self.timer("step"):
            metrics, batch = self.step()
            self.keep_rollouts(batch)
            self.stop_if_void(metrics, batch)
            if self.validation and trainer.test_freq > 0 and (last or self.step_no % trainer.test_freq == 0):
                metrics |= self.validate(tracker)
        tracker.log(self.step_no, metrics | self.performance.metrics(batch, self.timer))
        self.timer.reset()
        if trainer.save_freq > 0 and (last or self.step_no % trainer.save_freq == 0):
            self.save(tracker)

    def validate(self, tracker: Tracker) -> Metrics:
        assert self.validation is not None
        with self.roles.generating(self.timer):
            metrics, samples = self.validation.run(self.step_no, self.timer)
        tracker.generations(self.step_no, samples)
        return metrics

    def keep_rollouts(self, batch: Batch) -> None:
        folder = self.config.trainer.rollout_data_dir
        if folder:
            with self.timer("dump_rollout_generations"):
                dump_samples(folder, self.step_no, self.samples(batch), "trainer.rollout_data_dir")

    def samples(self, batch: Batch) -> list[Sample]:
        tokenizer = self.experience.tokenizer
        return samples_of(batch, lambda tokens: tokenizer.batch_decode(tokens, skip_special_tokens=True))

    def stop_if_void(self, metrics: Metrics, batch: Batch) -> None:
        """An update with a NaN or an infinity in it is skipped; several in a row end the run, with their rows saved."""
        void = max(metrics.get("actor/skipped", 0.0), metrics.get("critic/skipped", 0.0)) > 0
        self.void_updates = self.void_updates + 1 if void else 0
        if not void:
            return
        log.warning("step %d: loss or gradient was not finite; that update is skipped", self.step_no)
        if self.void_updates >= self.config.trainer.max_nonfinite_steps:
            folder = Path(self.config.trainer.default_local_dir) / "nonfinite"
            path = dump_samples(folder, self.step_no, self.samples(batch), "trainer.default_local_dir")
            raise UserError(
                f"{self.void_updates} updates in a row were not finite; the rows of the last are in {path}",
                fix="look at the rows and scores; lower actor_rollout_ref.actor.optim.lr, or use fp32",
            )

    def save(self, tracker: Tracker) -> None:
        """Everything that the rest of the run depends on. The step is logged before, so that no line of it is lost; how
        long this takes is said with the next one."""
        with self.timer("save_checkpoint"), self.store.write(self.step_no) as folder:
            for name, role in self.trained().items():
                (folder / name).mkdir()
                role.save(folder / name)
            for place in (folder / "actor", folder / "actor" / MERGED):
                if place.is_dir():
                    self.experience.loader.dataset.prompts.save(place)
            save_state(folder, {
                "step": self.step_no,
                "loader": self.experience.loader.state_dict(),
                "kl": self.kl.state_dict(),
                "rng": rng_state(),
                "void_updates": self.void_updates,
                "loggers": tracker.state_dict(),
                "config": flat(self.config),
            })  # fmt: skip

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Back to the state after the checkpoint's step; returns what loggers need to go on."""
        state = load_state(checkpoint.folder)
        check_config(state["config"], self.config)
        for name, role in self.trained().items():
            role.load(checkpoint.folder / name)
        self.experience.loader.load_state_dict(state["loader"])
        self.kl.load_state_dict(state["kl"])
        restore_rng(state["rng"])
        self.step_no, self.void_updates = state["step"], state["void_updates"]
        log.info("going on after step %d, from %s", self.step_no, checkpoint.folder)
        return state["loggers"]

    def trained(self) -> dict[str, Any]:
        roles = {"actor": self.roles.actor, "critic": self.roles.critic}
        return {name: role for name, role in roles.items() if role is not None}
