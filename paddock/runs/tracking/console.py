"""Progress for people (`console`) and for log parsers (`steps`).

`console` prints one line per step; on a terminal a live bar shows the time left, elsewhere the line ends with it; in a
notebook the line stands beside one bar that moves,
    12/60  Reward: 0.456, Length: 132, Actor Loss: 0.234, KL: 0.012, 1,234 tokens/s, ETA 0:01:12
    Validation Accuracy: 45.2%
`steps` prints every metric of a step on one line, the form that scripts which read such logs expect,
    step:12 - actor/pg_loss:0.234 - actor/ppo_kl:0.012 - ...
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from paddock.errors import printable
from paddock.runs.samples import Sample
from paddock.runs.tracking.run import LoggedRun, NumbersLogger

HIGHLIGHTS = (
    ("Reward", ("critic/score/mean",)),
    ("Length", ("response_length/mean",)),
    ("Loss", ("train/loss",)),
    ("Accuracy", ("train/accuracy",)),
    ("Validation Loss", ("val/loss",)),
    ("Validation Accuracy", ("val/accuracy",)),
    ("Actor Loss", ("actor/pg_loss",)),
    ("Critic Loss", ("critic/vf_loss",)),
    ("KL", ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")),
)
"""A label and the metrics that may stand for it, the first one present."""
UNLESS_ZERO = "KL"
"""Left out at 0: the policy is still the one that sampled, and no reference has a weight."""

SHOWN_CHARACTERS = 300


class Screen(Console):
    """A console whose reader may go away (`| head`): the run outlives it."""

    def write(self, line: str) -> None:
        """Prints a line as it is."""
        self.print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError("its reader is gone")


class ConsoleLog:
    run_id: str | None = None

    def __init__(self, run: LoggedRun, screen: Screen | None = None):
        self.run = run
        self.screen = screen or Screen()
        self.started = time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=self.screen,
            disable=not self.screen.is_terminal,
        )
        self.bar = self.progress.add_task("Training", total=run.total_steps, completed=run.first_step, eta="-")
        self.progress.start()
        self.notebook = NotebookBar(run) if self.screen.is_jupyter else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        eta = self.time_left(step)
        self.progress.update(self.bar, completed=step, eta=eta)
        if "training/epoch" in metrics:
            self.progress.update(self.bar, description=f"Epoch {metrics['training/epoch'] + 1:.0f}")
        if parts := highlights(metrics):
            parts += [] if self.screen.is_terminal else [f"ETA {eta}"]
            line = f"{step}/{self.run.total_steps}  " + ", ".join(parts)
            self.notebook.show(step, line) if self.notebook else self.screen.write(line)
        if found := validation(metrics):
            self.screen.write(found)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        table = Table("prompt", "answer", "score", title=f"validation answers at step {step}")
        for sample in samples:
            table.add_row(shorten(sample.prompt), shorten(sample.answer), number(sample.score))
        self.screen.print(table)

    def close(self) -> None:
        self.progress.stop()

    def time_left(self, step: int) -> str:
        """Returns the time left at the mean pace of the steps so far; the validation before the first one does not
        count."""
        done = step - self.run.first_step
        if done <= 0:
            self.started = time.monotonic()
            return "-"
        pace = (time.monotonic() - self.started) / done
        return str(timedelta(seconds=round(pace * (self.run.total_steps - step))))


class NotebookBar:
    """A bar in the output of a notebook's cell, with the last step's line beside it. Needs IPython alone."""

    def __init__(self, run: LoggedRun):
        page = importlib.import_module("IPython.display")
        self.html, self.total = page.HTML, run.total_steps
        self.handle = page.display(self.page(run.first_step, ""), display_id=True)

    def page(self, step: int, line: str) -> Any:
        return self.html(f'<progress value="{step}" max="{self.total}"></progress> <code>{escape(line)}</code>')

    def show(self, step: int, line: str) -> None:
        if self.handle is not None:  # None: IPython without a page
            self.handle.update(self.page(step, line))


class StepLines(NumbersLogger):
    """Prints every metric of a step on one line."""

    def __init__(self, run: LoggedRun, screen: Screen | None = None):
        self.screen = screen or Screen()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = " - ".join([f"step:{step}", *(f"{name}:{number(value)}" for name, value in metrics.items())])
        self.screen.write(line)


def highlights(metrics: Mapping[str, float]) -> list[str]:
    found = [(label, next((metrics[name] for name in names if name in metrics), None)) for label, names in HIGHLIGHTS]
    parts = [f"{label}: {value:.3g}" for label, value in found if value is not None and (value or label != UNLESS_ZERO)]
    if metrics.get("perf/time_per_step"):
        parts.append(f"{metrics['perf/total_num_tokens'] / metrics['perf/time_per_step']:,.0f} tokens/s")
    return parts


def validation(metrics: Mapping[str, float]) -> str | None:
    """Returns the mean of each data source: an accuracy if every score was 0 or 1 (it has a pass@1), else a reward."""
    found = []
    for name, value in metrics.items():
        variable, _, statistic = name.rpartition("/")
        if variable.startswith("val-core/") and statistic.startswith("mean@"):
            source = variable.removeprefix("val-core/").rpartition("/")[0]
            found.append((source, value, f"{variable.replace('val-core', 'val-aux', 1)}/pass@1" in metrics))
    if not found:
        return None
    shares = all(share for _, _, share in found)
    numbers = [(source, f"{100 * value:.1f}%" if shares else f"{value:.3g}") for source, value, _ in found]
    listed = numbers[0][1] if len(numbers) == 1 else ", ".join(f"{source} {text}" for source, text in numbers)
    return f"Validation {'Accuracy' if shares else 'Reward'}: {listed}"


def number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:.6g}"


def shorten(text: str) -> Text:
    text = printable(text)
    return Text(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ...")
