"""A plan: what a loaded config would do, put together from arithmetic, memory and advice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from paddock.commands.preflight import refusals
from paddock.config.distillation import TOPK, teachers_of
from paddock.config.paths import BUILTIN
from paddock.config.recipes import recipe_of
from paddock.config.topology import learns_from_rewards, needs_reference
from paddock.errors import UserError
from paddock.estimate.duration import Duration
from paddock.estimate.job import job
from paddock.estimate.memory import MemoryPlan, estimate
from paddock.facts.machine import GPU_MEMORY_GIB, gpu_named
from paddock.loading.load import Loaded
from paddock.loading.rules import Scope
from paddock.plan.advice import Advice, advise
from paddock.plan.ahead import LENGTHS, LONG_TAIL, Lengths, Outlook, ahead_advice, lengths_of, obstacle, outlooks
from paddock.plan.arithmetic import BatchPlan, DataFile, batch_plan, data_files
from paddock.plan.from_config import advice_facts, merged_job, seconds, speed_of


@dataclass(frozen=True)
class Plan:
    loaded: Loaded
    train_files: list[DataFile]
    val_files: list[DataFile]
    batch: BatchPlan
    memory: MemoryPlan | None  # None where the model's shape is not known
    time: Duration | None  # None also if the device's speed is not known
    advice: list[Advice]
    lengths: Lengths | None = None
    """None where no lengths of responses are known, or nothing may run ahead."""
    ahead: list[Outlook] = field(default_factory=list)
    """What running ahead would give for these lengths."""

    @property
    def notes(self) -> list[str]:
        missing = [file.note for file in [*self.train_files, *self.val_files] if file.note]
        path = self.loaded.config.actor_rollout_ref.model.path
        unknown = [] if self.memory else [f"the shape of {path} is not known: give a folder with a config.json"]
        refused = refusals(self.loaded.config, Scope.TRAINING, Scope.SCORING, Scope.MACHINE)
        return [*refused, *self.loaded.warnings, *missing, *unknown]

    @property
    def algorithm(self) -> dict[str, Any]:
        """Returns the estimator, the losses with their weights, and the roles that they need."""
        config = self.loaded.config
        actor, kl = config.actor_rollout_ref.actor, config.algorithm
        recipe = recipe_of(kl.adv_estimator)
        return {
            "estimator": kl.adv_estimator,
            "about": recipe.about if recipe else "registered by actor_rollout_ref.model.external_lib",
            "policy_loss": actor.policy_loss.loss_mode if learns_from_rewards(config) else None,
            "distillation": self._distillation,
            "aggregation": actor.loss_agg_mode or "the loss's own aggregation",
            "responses_per_prompt": config.actor_rollout_ref.rollout.n,
            "critic": bool(config.critic.enable),
            "reference": needs_reference(config),
            "kl_in_reward": kl.kl_ctrl.kl_coef if kl.use_kl_in_reward else 0.0,
            "kl_loss": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        }

    @property
    def _distillation(self) -> dict[str, Any] | None:
        """Returns the loss towards teachers, and who they are; None if there are none."""
        distillation = self.loaded.config.distillation
        loss = distillation.distillation_loss
        if not distillation.enabled:
            return None
        return {
            "loss": f"{loss.loss_mode}, k={loss.topk}" if loss.loss_mode == TOPK else loss.loss_mode,
            "as": "reward" if loss.use_policy_gradient else "loss",
            "weight": loss.distillation_loss_coef if learns_from_rewards(self.loaded.config) else 1.0,
            "teachers": [{"path": one.path, "key": one.key} for one in teachers_of(distillation)],
        }


def known_gpu(key: str, gpu: str) -> str:
    """Returns the name of a GPU in the table of memory; refuses one that is not there."""
    if (name := gpu_named(gpu)) is None:
        fix = f"one of: {', '.join(GPU_MEMORY_GIB)}"
        raise UserError("no such GPU in the table", key=key, value=gpu or "''", fix=fix)
    return name


def make(
    loaded: Loaded, gpu: str | None = None, assumed_rows: int | None = None, strict: bool = True,
    lengths: str | None = None,
) -> Plan:  # fmt: skip
    """`strict`: a data file must be here or be publicly known, unless its rows are assumed. `lengths` of responses: a
    tail, or the folder of a run; None: those of the config's own run, if it has begun and they have a long tail."""
    config = loaded.config
    strict = strict and assumed_rows is None
    train_files, val_files = data_files(config.data, "train", strict), data_files(config.data, "val", strict)
    batch = batch_plan(config, train_files, assumed_rows)
    work = job(config, gpu)
    memory = estimate(work) if work else None
    time = seconds(config, work, gpu) if work else None
    builtin = (config.actor_rollout_ref.model.path or "").startswith(BUILTIN)
    # the embedded default is tuned as it is: the guide's rules are for language models
    advice = [] if builtin else advise(advice_facts(config, batch, work, merged_job(loaded, gpu)))
    plan = Plan(loaded, train_files, val_files, batch, memory, time, advice)
    speed = speed_of(config, work, gpu) if work else None
    reason = obstacle(config, speed)
    if lengths and reason:
        raise UserError(reason, key=LENGTHS, value=lengths, fix="leave it out")
    known = None if reason else lengths_of(config, lengths)
    short = lengths is None and known is not None and known.tail < LONG_TAIL
    if work is None or speed is None or known is None or short:
        return plan
    table = outlooks(config, work, speed, known)
    return replace(plan, lengths=known, ahead=table, advice=[*advice, *ahead_advice(config, table, known)])


def make_supervised(loaded: Loaded, strict: bool = True) -> Plan:
    """Returns the plan of supervised training: the update of one model, without rollouts and the roles beside it."""
    loaded.warnings[:0] = refusals(loaded.config, Scope.ALONE)
    plan, update = make(loaded, strict=strict), "update_actor"
    memory, time = plan.memory, plan.time
    if memory:  # no engine writes beside it
        beside = ("rollout_weights", "kv_cache")
        parts = {name: size for name, size in memory.phases[update].items() if name not in beside}
        memory = replace(memory, phases={update: parts}, kv_sequences=1)
    return replace(plan, memory=memory, time=time and Duration({update: time.phases[update]}), advice=[])
