"""Where the metrics of a run go: metrics.jsonl and samples.jsonl always, and the loggers that trainer.logger names."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paddock.config.loggers import LOGGERS
from paddock.config.schema import TrainerConfig
from paddock.config.secrets import masked
from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.runs.samples import Sample
from paddock.runs.tracking.jsonl import SHOWN, MetricsFile, SamplesFile, evenly, worth_keeping
from paddock.runs.tracking.run import LoggedRun, Logger

log = logging.getLogger(__name__)


class Tracker:
    """``with Tracker(config.trainer, settings, total_steps) as tracker: tracker.log(step, metrics)``.

    A run that goes on from a checkpoint passes its step as `resumed` and what `state_dict` gave for it as `state`.
    A logger that fails later on is reported once and does not stop the run: the file has everything.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        settings: Mapping[str, Any],
        total_steps: int,
        resumed: int | None = None,
        state: Mapping[str, Any] | None = None,
    ):
        self.shown, self.every, self.total_steps = trainer.log_val_generations, trainer.test_freq, total_steps
        self.failed: set[str] = set()
        self.loggers: dict[str, Logger] = {}
        run = LoggedRun(
            project=trainer.project_name,
            name=trainer.experiment_name,
            folder=Path(trainer.default_local_dir),
            settings=masked(settings),
            total_steps=total_steps,
            resumed=resumed,
        )
        self.file, self.samples = MetricsFile(run.folder, resumed), SamplesFile(run.folder, resumed)
        try:
            for name in trainer.logger:
                if factory := LOGGERS[name].factory:
                    again = dataclasses.replace(run, run_id=(state or {}).get(name))
                    self.loggers[name] = open_logger(name, factory, again)
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        self.file.log(step, numbers)
        self._each(lambda logger: logger.log(step, numbers))

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Shows loggers trainer.log_val_generations of the samples, evenly spaced: the same prompts each time."""
        if self.every <= 0 or step % self.every or worth_keeping(step // self.every) or step == self.total_steps:
            self.samples.log(step, "validation", evenly(samples, SHOWN))
        if chosen := evenly(samples, self.shown):
            self._each(lambda logger: logger.generations(step, chosen))

    def rollouts(self, step: int, batch: Batch, read: Callable[[Batch], list[Sample]]) -> None:
        """Keeps a few rows of the step's batch in samples.jsonl, at steps that double; `read` turns rows into text."""
        if worth_keeping(step) or step == self.total_steps:
            rows = torch.tensor(evenly(range(len(batch)), SHOWN), dtype=torch.long)
            self.samples.log(step, "rollout", read(batch.rows(rows)))

    def state_dict(self) -> dict[str, str]:
        return {name: logger.run_id for name, logger in self.loggers.items() if logger.run_id is not None}

    def close(self) -> None:
        self._each(lambda logger: logger.close())
        self.file.close()
        self.samples.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _each(self, action: Callable[[Logger], None]) -> None:
        for name, logger in self.loggers.items():
            try:
                action(logger)
            except Exception as error:  # whatever a foreign service raises, hours of training outweigh it
                if name not in self.failed:
                    reason = f"{type(error).__name__}: {error}"
                    log.warning("logger %s failed (%s); %s has the metrics", name, reason, self.file.path)
                self.failed.add(name)


def open_logger(name: str, factory: str | Callable[[Any], Any], run: LoggedRun) -> Logger:
    """Returns the logger that `factory`, or what it names as `module:name`, makes for a run."""
    try:
        make: Any = factory
        if isinstance(factory, str):
            module, _, maker = factory.partition(":")
            make = getattr(importlib.import_module(module), maker)
        opened: Logger = make(run)
        return opened
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"does not start: {type(error).__name__}: {error}",
            key="trainer.logger",
            value=name,
            fix="log in, set it to work offline, or leave it out of trainer.logger: metrics.jsonl is always written",
        ) from error
