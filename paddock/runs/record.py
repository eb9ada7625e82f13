"""run.json: which command started a run, with which settings from where, and on what. Each (re)start adds an entry,
unless it changes nothing: a run that was killed and resumed leaves the file of a run that was not. Reading it imports
no torch, so that `paddock report` answers at once.

    {"starts": [{"after_step": 0, "command": "train", "settings": {...}, "origins": {...}, "environment": {...}}, ...],
     "finished_at": 80}
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paddock import __version__
from paddock.config.loggers import LOGGERS
from paddock.core.files import replacing
from paddock.facts.machine import GIB, OPTIONAL_PACKAGES, this_machine
from paddock.runs.settings import FREE

FILE, KEY = "run.json", "trainer.default_local_dir"
FINISHED = "finished_at"
PACKAGES = ("torch", "transformers", "triton", "megatron-core", *OPTIONAL_PACKAGES,
            *(kind.package for kind in LOGGERS.values() if kind.package))  # fmt: skip


def record_launch(
    folder: Path, settings: dict[str, Any], command: str, origins: Mapping[str, str], device: str, after_step: int
) -> None:
    """Writes the start of a run, or of its continuation after step `after_step`, into run.json.

    `settings`: as `tree.settings` returns them. `origins`: of each key where its value came from, as `Loaded` has it.
    """
    path = folder / FILE
    start = {"after_step": after_step, "command": command, "settings": settings, "origins": dict(origins)}
    start = json.loads(json.dumps(start | {"environment": environment(device)}, default=str))
    earlier = [entry for entry in starts(folder) if entry["after_step"] < after_step]
    if not earlier or differs(earlier[-1], start):
        earlier.append(start)
    with replacing(path, KEY) as file:
        file.write(json.dumps({"starts": earlier}, indent=1).encode())


def record_end(folder: Path, step: int) -> None:
    """Notes in run.json that the run has trained its last step."""
    with replacing(folder / FILE, KEY) as file:
        file.write(json.dumps({"starts": starts(folder), FINISHED: step}, indent=1).encode())


def is_finished(folder: Path) -> bool:
    """True if the run of this folder has trained its last step."""
    return FINISHED in recorded(folder)


def starts(folder: Path) -> list[dict[str, Any]]:
    """Returns the starts that a run folder's run.json lists; none if there is no such file, or one of another shape."""
    found: Any = recorded(folder).get("starts")
    whole = isinstance(found, list) and all(isinstance(entry, dict) and "after_step" in entry for entry in found)
    return found if whole else []


def recorded(folder: Path) -> dict[str, Any]:
    """Returns what run.json holds; nothing if it cannot be read."""
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def essence(start: Mapping[str, Any]) -> dict[str, Any]:
        settings = {key: value for key, value in start.get("settings", {}).items() if key not in FREE}
        return {**start, "after_step": None, "origins": None, "settings": settings}

    return essence(one) != essence(other)


def environment(device: str) -> dict[str, str]:
    """Returns versions and hardware: what another machine must have to compare with this one. No names, no paths."""
    machine = this_machine()
    return {
        "paddock": __version__,
        "python": platform.python_version(),
        **versions(),
        "device": device,
        "cpu": f"{machine.cores} cores, {cpu_name()}",
        "memory": f"{machine.memory / GIB:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }


@cache
def versions() -> dict[str, str]:
    """Returns the versions of the packages that matter and are here."""
    return {package: found for package in PACKAGES if (found := version_of(package))}


def version_of(package: str) -> str | None:
    """Returns the installed version of a distribution, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Returns the processor's model; its architecture if the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
