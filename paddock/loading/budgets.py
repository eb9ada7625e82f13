"""Token budgets, sequences at a time and gradient checkpointing that nobody set, chosen by the memory model for the
device at hand.

On accelerators of known memory, with an engine that generates from the trainer's own weights:

    rollout   the schema's number of sequences at a time, or as many as the KV cache has room for in full length

and if there is one accelerator, and the command trains:

    update    without checkpointing, the largest budget of at most MOST_TOKENS with which no phase of it is overfull;
              with checkpointing, the same, if less than BUSY_TOKENS fit without; if nothing fits, one full row
    prefill   the largest budget of at most MOST_PREFILL beside the KV cache and what rests on the device

All other runs keep the schema's defaults: on a CPU, if the memory or the model's shape is not known, and with an engine
that copies weights, whose memory is not modelled well enough to fill a device. The choice is a function of the config,
the shapes and the memory alone: a run that is resumed on the same device cuts its rows as before. A key that was set is
never changed, and the others are chosen beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paddock.config import tree
from paddock.config.phases import CUTS, PHASES, MicroBatches
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config, row_tokens
from paddock.config.topology import in_one_process
from paddock.estimate.job import job, planned_device
from paddock.estimate.memory import GIB, RoleLoad, StepLoad, answers_fit, estimate
from paddock.facts.machine import Machine
from paddock.loading.own_data import Choice
from paddock.loading.rules.unread import set_by_user

MOST_TOKENS = 49152
"""Largest micro-batch: the fastest one measured for SmolLM2-135M on an H200. Larger models need fewer tokens."""
BUSY_TOKENS = 8192
"""Below it layers are recomputed, for the sake of larger micro-batches. Assumed, not measured."""
MOST_PREFILL = 32768
FEW_SEQUENCES = 8
"""A number of sequences that is chosen is a multiple of it, unless it is smaller."""
UNIT = 1024
PREFILL = "actor_rollout_ref.rollout.max_num_batched_tokens"
SEQUENCES = "actor_rollout_ref.rollout.max_num_seqs"
MEMORY = "GiB of device memory"
"""End of the origin of each key that follows from it."""


def decide(
    config: Config, origins: dict[str, str], machine: Machine, gpu: str | None = None, trains: bool = True
) -> list[Choice]:
    """Sets the keys that follow from the device's memory, and their origins; returns what was chosen.

    `gpu`: the device to plan for, by its name; without one, the accelerator of `machine`. `trains`: False if the
    command only answers, so that the device holds the actor's weights and nothing else beside the KV cache.
    """
    work = job(config, gpu, machine) if _applies(config, machine, gpu) else None
    if work is None:
        return []
    memory = f"{work.hardware.memory_bytes / GIB:.0f} {MEMORY}"
    chosen = [] if set_by_user(origins.get(SEQUENCES, "")) else _sequences(work, memory, trains)
    for choice in chosen:
        work = replace(work, rollout=replace(work.rollout, max_sequences=choice.value))
    if in_one_process(config) and trains:
        for phase in (PHASES["update_actor"], PHASES["update_critic"]):
            role = work.roles.get(phase.role)
            if role is not None:
                chosen += _Update(config, origins, work, phase.name, role).choices(phase.checkpointing, memory)
        chosen += _prefill(origins, work, config.actor_rollout_ref.rollout.max_num_batched_tokens, memory)
    for choice in chosen:
        for key in (choice.key, *(cut.tokens_key for cut in _takers(choice.key, origins))):
            tree.put(config, key, choice.value)
        origins[choice.key] = choice.why
    return chosen


def undecided(origins: dict[str, str]) -> dict[str, str]:
    """Returns the origins without those that `decide` gave, so that it chooses again."""
    return {key: origin for key, origin in origins.items() if not origin.endswith(MEMORY)}


def _applies(config: Config, machine: Machine, gpu: str | None) -> bool:
    if config.trainer.device == "cpu" or engine_kind(config.actor_rollout_ref.rollout.name).copies_weights:
        return False
    return gpu is not None or planned_device(config, None, machine) is None


def _takers(key: str, origins: dict[str, str]) -> list[MicroBatches]:
    """Returns the micro-batches whose token budget is this key, or follows it unless it was set."""
    cuts: list[MicroBatches] = []
    keys = {key}
    for cut in CUTS.values():
        if cut.tokens_key in keys or origins.get(cut.tokens_key, "").removeprefix("follows ") in keys:
            keys.add(cut.tokens_key)
            cuts.append(cut)
    return cuts


@dataclass(frozen=True)
class _Update:
    """Chooses the micro-batches of one trained role."""

    config: Config
    origins: dict[str, str]
    work: StepLoad
    phase: str
    role: RoleLoad

    def choices(self, checkpointing: str, memory: str) -> list[Choice]:
        cut = CUTS[self.phase]
        budget_unset = cut.by_tokens(self.config) and cut.tokens_key not in self.origins
        unset = checkpointing not in self.origins and not self.role.activation_offload
        ways = (False, True) if unset else (self.role.checkpointing,)
        sizes = self.sizes() if budget_unset else range(self.role.update_tokens, self.role.update_tokens + 1)
        takers = _takers(cut.tokens_key, self.origins) if budget_unset else [cut]
        tokens, recompute, why = sizes[0], ways[-1], f"the update does not fit {memory}"
        for way in ways:
            most = largest(sizes, partial(self.fits, recompute=way, takers=takers))
            enough = BUSY_TOKENS if budget_unset and way != ways[-1] else sizes[0]
            if most is not None and most >= enough:
                tokens, recompute, why = most, way, f"from {memory}"
                break
        chosen = [Choice(cut.tokens_key, tokens, why)] if budget_unset else []
        return [*chosen, Choice(checkpointing, recompute, why)] if unset else chosen

    def sizes(self) -> range:
        """Budgets from one full row on; at the end, two rows find room, for reward models train on pairs."""
        longest, ranks = row_tokens(self.config.data), self.role.split.sequence
        least, pair = (-(-rows * longest // (ranks * UNIT)) * UNIT for rows in (1, 2))
        return range(least, max(MOST_TOKENS, pair) + 1, UNIT)

    def fits(self, tokens: int, recompute: bool, takers: list[MicroBatches]) -> bool:
        """True if no phase of `takers`, which are cut by this budget, is overfull."""
        roles = {**self.work.roles, PHASES[self.phase].role: replace(self.role, checkpointing=recompute)}
        for cut in takers:
            field: dict[str, Any] = {cut.field: tokens}
            if cut.role in roles:
                roles[cut.role] = replace(roles[cut.role], **field)
        phases = {phase for phase, cut in CUTS.items() if cut in takers}
        return fits(self.work.with_roles(**roles), phases)


def _sequences(work: StepLoad, memory: str, trains: bool) -> list[Choice]:
    """Returns no choice if all that are asked for have room, or none has: then the plan says that it does not fit."""

    def room(count: int) -> bool:
        changed = replace(work, rollout=replace(work.rollout, max_sequences=count))
        return fits(changed, {"gen"}) if trains else answers_fit(changed)

    asked = max(min(rows, work.rollout.max_sequences) for rows in (work.rollout.asked, work.rollout.validation_rows))
    most = largest(range(1, asked + 1), room)
    if most is None or most == asked:
        return []
    return [Choice(SEQUENCES, most // FEW_SEQUENCES * FEW_SEQUENCES or most, f"from {memory}")]


def _prefill(origins: dict[str, str], work: StepLoad, default: int, memory: str) -> list[Choice]:
    def room(tokens: int) -> bool:
        return fits(replace(work, rollout=replace(work.rollout, prefill_tokens=tokens)), {"gen"})

    most = largest(range(default, MOST_PREFILL + 1, UNIT), room) if PREFILL not in origins else None
    return [] if most is None else [Choice(PREFILL, most, f"from {memory}")]


def fits(work: StepLoad, phases: set[str]) -> bool:
    """True if these phases leave the memory model's margin free."""
    plan = estimate(work)
    return all(plan.total(phase) <= plan.limit for phase in phases & plan.phases.keys())


def largest(sizes: range, fitting: Callable[[int], bool]) -> int | None:
    """Returns the largest size that fits, if all smaller ones do; None if the smallest does not."""
    count = bisect_left(sizes, True, key=lambda size: not fitting(size))
    return sizes[count - 1] if count else None
