"""A plan of supervised training: the update of one model, without rollouts and the roles beside it."""

from __future__ import annotations

from dataclasses import replace

from paddock.commands.preflight import refusals
from paddock.estimate.duration import Duration
from paddock.estimate.memory import MemoryPlan
from paddock.loading.load import Loaded
from paddock.loading.rules import Scope
from paddock.plan.plan import Plan, make

UPDATE = "update_actor"


def make_supervised(loaded: Loaded, strict: bool = True) -> Plan:
    """Returns the plan of a config that supervised training would run. `strict`: data files must be here."""
    loaded.warnings[:0] = refusals(loaded.config, Scope.ALONE)
    plan = make(loaded, strict=strict)
    return replace(
        plan, memory=plan.memory and updating(plan.memory), time=plan.time and of_update(plan.time), advice=[]
    )


def updating(memory: MemoryPlan) -> MemoryPlan:
    """Returns the memory of the update alone: no engine writes beside it."""
    parts = {name: size for name, size in memory.phases[UPDATE].items() if name not in ("rollout_weights", "kv_cache")}
    return replace(memory, phases={UPDATE: parts}, kv_sequences=1)


def of_update(time: Duration) -> Duration:
    return Duration({UPDATE: time.phases[UPDATE]})
