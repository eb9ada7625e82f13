"""The run that a logger is made for, and the methods that a logger has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paddock.runs.samples import Sample


@dataclass(frozen=True)
class LoggedRun:
    project: str
    name: str
    folder: Path
    """trainer.default_local_dir; loggers that write files write below it."""
    settings: Mapping[str, Any]
    """The whole config, nested."""
    total_steps: int
    resumed: int | None = None
    """The step of the checkpoint from which the run goes on; None: it starts."""
    run_id: str | None = None
    """The logger's own id of the run that goes on."""

    @property
    def first_step(self) -> int:
        return self.resumed or 0


class Logger(Protocol):
    run_id: str | None
    """Kept in checkpoints, so that a resumed run continues the same one; None where there is nothing to keep."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs a few validation answers, the same prompts each time."""
        ...

    def close(self) -> None: ...


class NumbersLogger:
    """Is the base of loggers that show no answers and hold nothing open."""

    run_id: str | None = None

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs nothing: its readers read numbers."""

    def close(self) -> None:
        """Closes nothing."""
