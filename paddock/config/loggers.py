"""The catalogue of loggers: which object writes metrics for each name of trainer.logger, and the package it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_T = "paddock.runs.tracking"


@dataclass(frozen=True)
class LoggerKind:
    """What a logger declares about itself."""

    factory: str | Callable[[Any], Any] | None
    """A function or class that takes a `LoggedRun` (runs/tracking/run.py) and returns a `Logger`, or `module:name`
    of one; None for metrics.jsonl, which every run writes."""
    package: str | None = None
    """Package that must be installed."""


LOGGERS: dict[str, LoggerKind] = {
    "console": LoggerKind(f"{_T}.console:ConsoleLog"),
    "steps": LoggerKind(f"{_T}.console:StepLines"),
    "tensorboard": LoggerKind(f"{_T}.adapters:TensorBoard", "tensorboard"),
    "wandb": LoggerKind(f"{_T}.adapters:WandB", "wandb"),
    "mlflow": LoggerKind(f"{_T}.adapters:MLflow", "mlflow"),
    "swanlab": LoggerKind(f"{_T}.adapters:SwanLab", "swanlab"),
    "trackio": LoggerKind(f"{_T}.adapters:Trackio", "trackio"),
    "prometheus": LoggerKind(f"{_T}.prometheus:Prometheus"),
    "file": LoggerKind(None),
}
"""A plug-in adds an entry of its own when it is imported."""
