"""`paddock plan`: what a run would do, on hardware that need not be here. Loads no weights and imports no torch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

from paddock.errors import UserError
from paddock.loading.load import load
from paddock.plan.arithmetic import roles
from paddock.plan.plan import Plan, known_gpu, make


def run(arguments: list[str], strict: bool = True, chooses: bool = True) -> int:
    """The command: its own flags may stand anywhere among the overrides. `chooses`: see `load`."""
    flags, overrides = _flags(arguments)
    loaded = load(overrides, here=strict, gpu=flags["gpu"], chooses=chooses)
    plan = make(loaded, flags["gpu"], flags["rows"], strict, flags["lengths"])
    if flags["json"]:
        print(json.dumps(as_json(plan), indent=2))
    else:
        from paddock.plan.tables import render

        render(plan)
    return 0


def _flags(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    flags: dict[str, Any] = {"json": False, "gpu": None, "rows": None, "lengths": None}
    rest: list[str] = []
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        if argument == "--json":
            flags["json"] = True
        elif name in ("--gpu", "--rows", "--lengths"):
            flags[name[2:]] = value if equals else next(given, "")
        else:
            rest.append(argument)
    if flags["rows"] is not None:
        if not re.fullmatch("0*[1-9][0-9]{0,17}", flags["rows"]):
            raise UserError("is not a number of rows", key="--rows", value=flags["rows"] or "''", fix="--rows 7473")
        flags["rows"] = int(flags["rows"])
    if flags["gpu"] is not None:
        flags["gpu"] = known_gpu("--gpu", flags["gpu"])
    return flags, rest


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
        "algorithm": plan.algorithm,
        "roles": roles(plan.loaded.config),
        "batch": asdict(plan.batch),
        "memory": memory,
        "seconds": plan.time and {"step": plan.time.step, "phases": dict(plan.time.phases)},
        "running_ahead": [asdict(outlook) for outlook in plan.ahead],
        "advice": [asdict(advice) for advice in plan.advice],
        "notes": plan.notes,
    }
