"""`paddock plan`: what a run would do, on hardware that need not be here. Loads no weights and imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from paddock.config.load import Loaded, load
from paddock.config.paths import BUILTIN
from paddock.config.recipes import recipe_of
from paddock.config.schema import Config
from paddock.config.topology import needs_reference
from paddock.errors import UserError
from paddock.facts.machine import GPU_MEMORY_GIB
from paddock.plan.advice import Advice, advise
from paddock.plan.arithmetic import BatchPlan, DataFile, batch_plan, data_files, roles
from paddock.plan.from_config import advice_facts, job
from paddock.plan.memory import Job, MemoryPlan, estimate

GIB = 1024**3


@dataclass(frozen=True)
class Plan:
    loaded: Loaded
    train_files: list[DataFile]
    val_files: list[DataFile]
    batch: BatchPlan
    memory: MemoryPlan | None  # None where the model's shape is not known
    advice: list[Advice]

    @property
    def notes(self) -> list[str]:
        missing = [file.note for file in [*self.train_files, *self.val_files] if file.note]
        path = self.loaded.config.actor_rollout_ref.model.path
        unknown = [] if self.memory else [f"the shape of {path} is not known: give a folder with a config.json"]
        return [*self.loaded.warnings, *missing, *unknown]


def run(arguments: list[str]) -> int:
    """The command: its own flags may stand anywhere among the overrides."""
    flags, overrides = _flags(arguments)
    plan = make(load(overrides), flags["gpu"], flags["rows"])
    if flags["json"]:
        print(json.dumps(as_json(plan), indent=2))
    else:
        show(plan)
    return 0


def _flags(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    flags: dict[str, Any] = {"json": False, "gpu": None, "rows": None}
    rest: list[str] = []
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        if name == "--json":
            flags["json"] = True
        elif name in ("--gpu", "--rows"):
            flags[name[2:]] = value if equals else next(given, "")
        else:
            rest.append(argument)
    if flags["rows"] is not None:
        if not flags["rows"].isdigit() or int(flags["rows"]) < 1:
            raise UserError("is not a number of rows", key="--rows", value=flags["rows"] or "''", fix="--rows 7473")
        flags["rows"] = int(flags["rows"])
    if flags["gpu"] is not None and flags["gpu"].lower() not in GPU_MEMORY_GIB:
        known = ", ".join(GPU_MEMORY_GIB)
        raise UserError("no such GPU in the table", key="--gpu", value=flags["gpu"] or "''", fix=f"one of: {known}")
    return flags, rest


def make(loaded: Loaded, gpu: str | None = None, assumed_rows: int | None = None) -> Plan:
    config = loaded.config
    train_files, val_files = data_files(config, "train", assumed_rows), data_files(config, "val", assumed_rows)
    batch = batch_plan(config, train_files, assumed_rows)
    work = job(config, gpu)
    memory = estimate(work) if work else None
    return Plan(loaded, train_files, val_files, batch, memory, _advice(config, batch, work))


def _advice(config: Config, batch: BatchPlan, work: Job | None) -> list[Advice]:
    """The embedded default is tuned as it is: the guide's rules are for language models."""
    builtin = (config.actor_rollout_ref.model.path or "").startswith(BUILTIN)
    return [] if builtin else advise(advice_facts(config, batch, work))


def algorithm(config: Config) -> dict[str, Any]:
    actor, kl = config.actor_rollout_ref.actor, config.algorithm
    recipe = recipe_of(kl.adv_estimator)
    return {
        "estimator": kl.adv_estimator,
        "about": recipe.about if recipe else "registered by actor_rollout_ref.model.external_lib",
        "policy_loss": actor.policy_loss.loss_mode,
        "aggregation": actor.loss_agg_mode or "the loss's own aggregation",
        "responses_per_prompt": config.actor_rollout_ref.rollout.n,
        "critic": bool(config.critic.enable),
        "reference": needs_reference(config),
        "kl_in_reward": kl.kl_ctrl.kl_coef if kl.use_kl_in_reward else 0.0,
        "kl_loss": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
    }


def as_json(plan: Plan) -> dict[str, Any]:
    memory = plan.memory and {
        "phases": {phase: dict(parts) for phase, parts in plan.memory.phases.items()},
        "per_device_bytes": plan.memory.hardware.memory_bytes,
        "limit_bytes": plan.memory.limit,
        "host_bytes": plan.memory.host_bytes,
        "kv_tokens": plan.memory.kv_tokens,
        "kv_sequences": plan.memory.kv_sequences,
        "fits": plan.memory.fits,
    }
    return {
        "config": plan.loaded.as_dict(),
        "origins": plan.loaded.origins,
        "algorithm": algorithm(plan.loaded.config),
        "roles": roles(plan.loaded.config),
        "batch": asdict(plan.batch),
        "memory": memory,
        "advice": [asdict(advice) for advice in plan.advice],
        "notes": plan.notes,
    }


def show(plan: Plan) -> None:
    from paddock.plan.tables import render

    render(plan)
