"""Loggers of others, one thin class each. Their packages are imported here, and only when a run names them.

Whether and where they send anything is theirs to decide, by their own variables: WANDB_MODE=offline,
SWANLAB_MODE=offline, MLFLOW_TRACKING_URI (and MLFLOW_DISABLE_TELEMETRY=true, or it asks its makers' server what to
report), TRACKIO_DIR and TRACKIO_SPACE_ID.
"""

from __future__ import annotations

import importlib
import secrets
import string
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.runs.samples import Sample
from paddock.runs.tracking.run import LoggedRun

GENERATIONS = "val/generations"
COLUMNS = ("step", "prompt", "answer", "score", "ground_truth")


def need(logger: str, package: str | None = None) -> ModuleType:
    """Imports the logger's package, by default that of its name; the extra that installs it has the same name."""
    package = package or logger
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"needs {package}, which cannot be imported ({error})",
            key="trainer.logger",
            value=logger,
            fix=f"{install_command(package)}, or leave it out of trainer.logger",
        ) from error


class TensorBoard:
    run_id: str | None = None

    def __init__(self, run: LoggedRun):
        need("tensorboard")
        summaries = importlib.import_module("torch.utils.tensorboard")
        beyond = None if run.resumed is None else run.resumed + 1  # hides what the interrupted run wrote later
        self.writer = summaries.SummaryWriter(str(run.folder / "tensorboard"), purge_step=beyond)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        texts = [f"**{s.score:g}**\n\n```\n{s.prompt}\n```\n```\n{s.answer}\n```" for s in samples]
        self.writer.add_text(GENERATIONS, "\n\n---\n\n".join(texts), step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, run: LoggedRun):
        self.wandb = need("wandb")
        self.run_id: str | None = run.run_id or new_id()
        self.run = self.wandb.init(
            project=run.project,
            name=run.name,
            config=dict(run.settings),
            dir=str(run.folder),
            id=self.run_id,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        table = self.wandb.Table(columns=list(COLUMNS), data=[list(row.values()) for row in rows(step, samples)])
        self.run.log({GENERATIONS: table}, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    def __init__(self, run: LoggedRun):
        self.mlflow = need("mlflow")
        self.mlflow.set_experiment(run.project)
        known: dict[str, Any] = {"run_id": run.run_id} if run.run_id else {"run_name": run.name}
        self.run_id: str | None = self.mlflow.start_run(**known).info.run_id
        self.mlflow.log_dict(dict(run.settings), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.mlflow.log_metrics({allowed(name): value for name, value in metrics.items()}, step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        self.mlflow.log_dict(rows(step, samples), f"generations/{step}.json")

    def close(self) -> None:
        self.mlflow.end_run()


class SwanLab:
    def __init__(self, run: LoggedRun):
        self.swanlab = need("swanlab")
        self.run_id: str | None = run.run_id or new_id()
        self.swanlab.init(
            project=run.project,
            experiment_name=run.name,
            config=dict(run.settings),
            logdir=str(run.folder / "swanlab"),
            id=self.run_id,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.swanlab.log(dict(metrics), step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        texts = [self.swanlab.Text(f"{s.prompt}\n---\n{s.answer}", caption=f"score {s.score:g}") for s in samples]
        self.swanlab.log({GENERATIONS: texts}, step=step)

    def close(self) -> None:
        self.swanlab.finish()


class Trackio:
    """Finds a run by its name, so the name carries the id."""

    def __init__(self, run: LoggedRun):
        self.trackio = need("trackio")
        self.run_id: str | None = run.run_id or f"{run.name}-{new_id()[:8]}"
        self.trackio.init(project=run.project, name=self.run_id, config=dict(run.settings), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log(dict(metrics), step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        frame = importlib.import_module("pandas").DataFrame(rows(step, samples))
        self.trackio.log({GENERATIONS: self.trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self.trackio.finish()


def rows(step: int, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [dict(zip(COLUMNS, (step, s.prompt, s.answer, s.score, str(s.ground_truth)), strict=True)) for s in samples]


def new_id() -> str:
    """Returns twenty-one small letters and digits, an id that all these loggers accept."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(21))


def allowed(name: str) -> str:
    """Returns a metric's name as MLflow takes it: without the `@` of mean@8."""
    return name.replace("@", "_at_")
