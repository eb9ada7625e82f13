"""The numbers that duration and advice ask for, read off a config."""

from __future__ import annotations

import os
from copy import deepcopy

from paddock.config.phases import CUTS
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import computes_merged, estimator_needs, wants_one_thread, world_size
from paddock.estimate.counts import Work
from paddock.estimate.duration import Duration, duration
from paddock.estimate.job import job, planned_device
from paddock.estimate.memory import StepLoad
from paddock.facts.machine import GPU_SPEED, Machine, Speed, this_machine
from paddock.facts.models import shape_of
from paddock.facts.processor import processor_speed
from paddock.loading import budgets
from paddock.loading.load import Loaded
from paddock.plan.advice import Facts
from paddock.plan.arithmetic import BatchPlan


def seconds(config: Config, work: StepLoad, gpu: str | None = None, machine: Machine | None = None) -> Duration | None:
    """Returns the seconds of a step; None if the device's speed is not known."""
    speed = speed_of(config, work, gpu, machine)
    if speed is None:
        return None
    rows = Work(
        prompts=config.data.train_batch_size,
        responses=config.actor_rollout_ref.rollout.n,
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.data.max_response_length,
        epochs=config.actor_rollout_ref.actor.ppo_epochs,
        shares_prompts=_shares_prompts(config),
    )
    return duration(work, rows, speed)


def _shares_prompts(config: Config) -> bool:
    """True if a group's prompt is computed once in training, by the keys alone; a role's ranks may still forbid it."""
    group = config.actor_rollout_ref
    packed, exact = group.model.use_remove_padding, group.numerics == "exact"
    return packed and not exact and group.actor.use_prefix_grouper is not False


def speed_of(config: Config, work: StepLoad, gpu: str | None, machine: Machine | None = None) -> Speed | None:
    """Returns a GPU's speed by its data sheet; None if only its memory is known. A processor's as measured, of the
    threads that the run's processes have together; None for the processors of other nodes."""
    machine = machine or this_machine()
    if work.hardware.gpus:
        device = planned_device(config, gpu, machine)
        return None if device is None else GPU_SPEED[device].shared(config.trainer.ranks_per_device)
    if config.trainer.nnodes > 1:
        return None
    return processor_speed(min(machine.cores, world_size(config) * threads(config, machine)), work.compute_bytes == 2)


def threads(config: Config, machine: Machine) -> int:
    """Threads of one process on a CPU; the user's own number wins."""
    own = os.environ.get("OMP_NUM_THREADS", "")
    if own.isdecimal() and int(own):
        return int(own)
    return 1 if wants_one_thread(config) else machine.cores


def merged_job(loaded: Loaded, gpu: str | None = None) -> StepLoad | None:
    """Returns the job with `lora.merge` and what is chosen then; None if it is set, where it would not make one GPU's
    rollouts and updates read merged weights, and where the model's shape is not known."""
    config: Config = deepcopy(loaded.config)
    if config.actor_rollout_ref.model.lora.merge or engine_kind(config.actor_rollout_ref.rollout.name).copies_weights:
        return None
    config.actor_rollout_ref.model.lora.merge = True
    if not computes_merged(config) or config.trainer.device == "cpu":
        return None
    budgets.decide(config, budgets.undecided(loaded.origins), this_machine(), gpu)
    return job(config, gpu)


def advice_facts(config: Config, batch: BatchPlan, work: StepLoad | None, merged: StepLoad | None = None) -> Facts:
    shape = shape_of(config.actor_rollout_ref.model.path or "")
    return Facts(
        group=config.actor_rollout_ref,
        algorithm=config.algorithm,
        batch=batch,
        needs=estimator_needs(config),
        critic=bool(config.critic.enable),
        billions=shape.billions if shape else None,
        test_freq=config.trainer.test_freq if config.data.val_files else -1,
        cut_by_rows=frozenset(phase for phase, cut in CUTS.items() if not cut.by_tokens(config)),
        job=work,
        merged=merged,
    )
