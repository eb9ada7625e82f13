"""Runs become curves: runs that differ only by seed are drawn as their mean with a band of one standard deviation."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from paddock.runs.reading import RecordedRun

SEED = re.compile(r"(^|[._])seed$")
UNCOMPARED = frozenset(
    f"trainer.{name}"
    for name in ("default_local_dir", "experiment_name", "project_name", "logger", "resume_mode", "resume_from_path")
) | {"trainer.rollout_data_dir", "trainer.validation_data_dir"}
"""Keys that name a run and its files, and change nothing about its training."""
POINTS = 1000
"""Points of one series at most; several runs share them, down to FEWEST each."""
FEWEST = 200


@dataclass(frozen=True)
class Curve:
    """One run, or several that differ only by seed."""

    label: str
    runs: list[RecordedRun]


@dataclass(frozen=True)
class Series:
    """A metric of a curve. `low` and `high` bound the band of several seeds; None for a single run."""

    steps: list[int]
    values: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


def curves_of(runs: Sequence[RecordedRun]) -> list[Curve]:
    """Groups runs whose settings are equal but for distinct seeds; a run with unknown settings stays alone."""
    labels = distinct_names(runs)
    groups: dict[Any, list[int]] = {}
    for i, run in enumerate(runs):
        groups.setdefault(essence(run) if run.settings else i, []).append(i)
    curves = []
    for members in groups.values():
        if len({seed_of(runs[i]) for i in members}) == len(members) > 1:
            label = f"{common_label([labels[i] for i in members])} ({len(members)} seeds)"
            curves.append(Curve(label, [runs[i] for i in members]))
        else:
            curves += [Curve(labels[i], [runs[i]]) for i in members]
    return curves


def essence(run: RecordedRun) -> str:
    """Returns all settings that runs of one curve share, as text."""
    kept = {key: value for key, value in run.settings.items() if not SEED.search(key) and key not in UNCOMPARED}
    return repr(sorted(kept.items()))


def seed_of(run: RecordedRun) -> str:
    return repr(sorted((key, value) for key, value in run.settings.items() if SEED.search(key)))


def distinct_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the folders' names, with as many parents as tell them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return names


def common_label(names: Sequence[str]) -> str:
    """Returns what the names share, without the word seed at its end: run-seed1, run-seed2 -> run."""
    first, last = min(names), max(names)  # what these two share, all between them share
    same = next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    shared = re.sub(r"[-_. /]*(seed|s)?[-_=. ]*\d*$", "", first[:same])
    return shared.rsplit("/", 1)[-1] or f"{names[0]} and {len(names) - 1} more"


def series_of(curve: Curve, metric: str) -> Series | None:
    """Returns a metric of a curve; of several runs the mean and one standard deviation around it, at common steps."""
    found = [run.metrics[metric] for run in curve.runs if metric in run.metrics]
    if not found:
        return None
    if len(curve.runs) == 1:
        steps, values = found[0]
        return Series(steps, values)
    tables = [
        {step: value for step, value in zip(*columns, strict=True) if value is not None and math.isfinite(value)}
        for columns in found
    ]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    mean = [statistics.fmean(table[step] for table in tables) for step in shared]
    spread = [statistics.stdev(table[step] for table in tables) if len(tables) > 1 else 0.0 for step in shared]
    low = [m - s for m, s in zip(mean, spread, strict=True)]
    high = [m + s for m, s in zip(mean, spread, strict=True)]
    return Series(shared, list(mean), list(low), list(high))


def thinned(series: Series, most: int) -> Series:
    """Returns at most `most` points of a series: of each stretch the lowest and the highest, so that spikes stay."""
    count = len(series.steps)
    if count <= most:
        return series
    buckets, keep = max(1, most // 2 - 1), {0, count - 1}
    values = cast(list[float], series.values)
    for bucket in range(buckets):
        stretch = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        if finite := [i for i in stretch if values[i] is not None]:
            keep |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    chosen = sorted(keep)
    return Series(
        [series.steps[i] for i in chosen],
        [series.values[i] for i in chosen],
        series.low and [series.low[i] for i in chosen],
        series.high and [series.high[i] for i in chosen],
    )


def metric_names(runs: Iterable[RecordedRun]) -> list[str]:
    """Returns the names of all metrics, in the order in which the runs logged them."""
    return list(dict.fromkeys(name for run in runs for name in run.metrics))
