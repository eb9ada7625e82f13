"""What a run achieved, in a few numbers: held-out results before and after, rewards first and last, time by phase."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from datetime import timedelta

from paddock.config.phases import PHASES
from paddock.runs.reading import RecordedRun
from paddock.trainer.learning import warning

HELD_OUT = re.compile(r"val-core/(?P<source>.+)/(?P<variable>[^/]+)/mean@\d+")
OTHER = "other"


@dataclass(frozen=True)
class Trend:
    """A number at the beginning and at the end of a run."""

    label: str
    before: float | None
    """None if it was measured once."""
    after: float
    metric: str
    percent: bool = False
    better: int = 0
    """1 if more is better, -1 if less is, 0 if neither."""
    note: str = ""

    def text(self) -> str:
        after = amount(self.after, self.percent)
        return after if self.before is None else f"{amount(self.before, self.percent)} -> {after}"


def amount(value: float, percent: bool = False) -> str:
    """Returns a number with three digits, or all digits before the point."""
    if percent:
        return f"{100 * value:.1f}%"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def held_out(run: RecordedRun) -> list[Trend]:
    """Returns the change of each held-out result: the mean of each data source, or loss and accuracy of `sft` and
    `rm`."""
    changes = []
    matches = [(name, match) for name in run.metrics if (match := HELD_OUT.fullmatch(name))]
    for name, match in matches:
        title, percent = title_of(match, run.metrics)
        label = f"{title}, {match['source']}" if len(matches) > 1 else title
        changes += change(run, name, label, percent=percent, better=1)
    changes += change(run, "val/accuracy", "Held-out accuracy", percent=True, better=1)
    changes += change(run, "val/loss", "Held-out loss", better=-1)
    return changes


def title_of(match: re.Match[str], names: Container[str]) -> tuple[str, bool]:
    """Returns the title of a data source's mean, and whether the mean is a share, to be shown in percent: every score
    was 0 or 1, and validation logged pass@1 beside it."""
    share = f"val-aux/{match['source']}/{match['variable']}/pass@1" in names
    return "Held-out accuracy" if share else "Held-out reward", share


def change(run: RecordedRun, metric: str, label: str, percent: bool = False, better: int = 0) -> list[Trend]:
    steps, values = run.metrics.get(metric, ([], []))
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not points:
        return []
    first, last = points[0], points[-1]
    note = ""
    if better and len(points) > 2:
        best = max(points, key=lambda point: better * point[1])
        note = f"best {amount(best[1], percent)} at step {best[0]:,}"
    return [Trend(label, first[1] if len(points) > 1 else None, last[1], metric, percent, better, note)]


def averaged(run: RecordedRun, metric: str, label: str, better: int = 0, percent: bool = False) -> list[Trend]:
    """Returns the change of a training metric between the means of its first and last tenth, at most 10 steps each."""
    values = run.values(metric)
    if not values:
        return []
    width = max(1, min(10, len(values) // 10))
    note = f"mean of the first and last {width} steps" if width > 1 else "first and last step"
    first, last = sum(values[:width]) / width, sum(values[-width:]) / width
    return [Trend(label, first if len(values) > 1 else None, last, metric, percent, better, note)]


def training(run: RecordedRun) -> list[Trend]:
    return [
        *averaged(run, "critic/score/mean", "Reward", better=1),
        *averaged(run, "train/accuracy", "Training accuracy", better=1, percent=True),
        *averaged(run, "train/loss", "Training loss", better=-1),
        *averaged(run, "response_length/mean", "Response length"),
        *averaged(run, "actor/entropy", "Entropy"),
    ]


def phase_seconds(row: dict[str, float | None]) -> dict[str, float]:
    """Returns the seconds of one step by phase; `other` is what no phase accounts for."""
    timed = {phase: float(row.get(f"timing_s/{phase}") or 0.0) for phase in PHASES}
    inside = sum(seconds for phase, seconds in timed.items() if not PHASES[phase].outside)
    rest = max(0.0, float(row.get("timing_s/step") or 0.0) - inside)
    found = {PHASES[phase].title: seconds for phase, seconds in timed.items() if seconds > 0}
    return found | ({OTHER: rest} if rest else {})


def total_seconds(rows: Iterable[dict[str, float | None]]) -> dict[str, float]:
    """Returns the seconds of all steps by phase, in the order of PHASES."""
    total = dict.fromkeys([*(phase.title for phase in PHASES.values()), OTHER], 0.0)
    for row in rows:
        for phase, seconds in phase_seconds(row).items():
            total[phase] += seconds
    return {phase: seconds for phase, seconds in total.items() if seconds > 0}


def duration(seconds: float) -> str:
    """Returns seconds as people say them: 8.3 s, 2 min 31 s, 3 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = timedelta(seconds=round(seconds))
    minutes, rest = divmod(int(whole.total_seconds()), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def speed(run: RecordedRun) -> float | None:
    """Returns tokens per second of all steps."""
    seconds = sum(run.values("perf/time_per_step"))
    return sum(run.values("perf/total_num_tokens")) / seconds if seconds else None


def summary_lines(run: RecordedRun) -> list[str]:
    """Returns the summary of a run for a console, label by label."""
    judged = [trend for trend in training(run) if trend.better]  # the page has those without a better direction, too
    rows = [(trend.label, trend.text(), trend.note) for trend in (*held_out(run), *judged)]
    if total := total_seconds(run.rows):
        parts = sorted(total.items(), key=lambda part: -part[1])
        whole = sum(total.values())
        shares = ", ".join(f"{name} {100 * seconds / whole:.0f}%" for name, seconds in parts if seconds > 0.005 * whole)
        rows.append(("Time of steps", duration(whole), shares))
    if found := warning(run.rows):
        rows.append(("Warning", found, ""))
    width = max((len(label) for label, _, _ in rows), default=0)
    return [f"{label:<{width}}  {text}" + (f"  ({note})" if note else "") for label, text, note in rows]
