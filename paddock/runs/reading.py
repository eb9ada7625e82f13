"""Reads what a run folder holds: metrics.jsonl, and if they are there samples.jsonl, run.json and checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paddock.errors import UserError
from paddock.runs.checkpoint import CheckpointStore
from paddock.runs.record import starts

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
COMMAND = "paddock report"


@dataclass(frozen=True)
class RecordedRun:
    """One run as its folder describes it."""

    folder: Path
    rows: list[dict[str, Any]]
    """Lines of metrics.jsonl in the order of steps; a metric that was not finite is None."""
    samples: list[dict[str, Any]]
    """Lines of samples.jsonl."""
    starts: list[dict[str, Any]]
    """The run's start, and one entry for each continuation that changed something; empty for older runs."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Key -> value at the end of the run; from its newest checkpoint if the folder has no run.json."""
        if self.starts:
            return dict(self.starts[-1].get("settings", {}))
        store = CheckpointStore(self.folder)
        return next((found for step in reversed(store.steps()) if (found := settings_at(store.folder(step)))), {})

    @cached_property
    def origins(self) -> dict[str, str]:
        return dict(self.starts[-1].get("origins", {})) if self.starts else {}

    @cached_property
    def environment(self) -> dict[str, str]:
        return dict(self.starts[-1].get("environment", {})) if self.starts else {}

    @cached_property
    def metrics(self) -> dict[str, tuple[list[int], list[float | None]]]:
        """Metric -> the steps that have it, and its values."""
        found: dict[str, tuple[list[int], list[float | None]]] = {}
        for row in self.rows:
            for name, value in row.items():
                if name != "step":
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(row["step"])
                    values.append(value)
        return found

    def values(self, metric: str) -> list[float]:
        """Returns the finite values of a metric in the order of steps."""
        return [value for value in self.metrics.get(metric, ([], []))[1] if value is not None]


def read_run(folder: Path) -> RecordedRun:
    """Reads a run folder, or refuses what is none."""
    if folder.name == METRICS:
        folder = folder.parent
    rows = [
        row
        for row in lines(metrics_of(folder))
        if all(value is None or isinstance(value, int | float) for value in row.values())
    ]
    if not rows:
        raise UserError(
            "no step was logged yet", key=COMMAND, value=folder, fix="wait for the first step, or name another run"
        )
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    return RecordedRun(
        folder=folder,
        rows=[merged[step] for step in sorted(merged)],
        samples=[
            line
            for line in lines(folder / SAMPLES)
            if isinstance(line.get("samples"), list) and isinstance(line.get("source"), str)
        ],
        starts=starts(folder),
    )


def metrics_of(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError("no such folder", key=COMMAND, value=folder, fix="name the folder that holds metrics.jsonl")
    path = folder / METRICS
    if not path.is_file():
        inside = sorted(str(found.parent) for found in folder.glob(f"*/{METRICS}"))[:5]
        fix = f"{COMMAND} {' '.join(inside)}" if inside else "name the trainer.default_local_dir of a run"
        raise UserError("holds no metrics.jsonl", key=COMMAND, value=folder, fix=fix)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a jsonl file that carry a step; a torn last line is left out, and what is not finite is
    None."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise UserError(reason, key=COMMAND, value=path, fix="make it readable") from error
    return [record for line in text.splitlines() if (record := record_of(line))]


def record_of(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line that carries a step; None for a torn line."""
    try:
        record = json.loads(line, parse_constant=lambda name: None)  # NaN and Infinity are no JSON
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def settings_at(checkpoint: Path) -> dict[str, Any]:
    """Returns the settings of the run that wrote a checkpoint; none if it cannot be read."""
    try:
        settings = json.loads((checkpoint / "trainer_state.json").read_bytes())["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
