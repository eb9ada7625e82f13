"""Compare Paddock's run of an experiment with that of another trainer from the same start, and draw both.

    python -m benchmarks.results.comparison --curves FOLDER --out FOLDER

FOLDER has the documents of both, NAME-SEED.json and trl-NAME-SEED.json, as __main__.py and against_trl.py write them.
Other folders (--again) may have the same experiment and seed run again by Paddock, under the same name: two runs differ
by chance even if nothing else does. Prints five tables and draws OUT/against_trl_NAME.svg, a line for each seed.

Time is that of the steps since the first one began, with its warm-up; loading, validation and checkpoints count for
neither side. Reward is that of a step's samples, smoothed over up to two steps on either side. It has always as many on
both sides, so that a rising curve is neither early nor late, and the last step stands for itself.

Learning per minute, up to a level of reward, is what was gained until the curve first reached the level, divided by the
minutes until then. Levels that both reached count, so nothing is extrapolated: a faster trainer gets no credit for what
the slower one had no time for, and both gains are the same, so that the ratio is that of the times.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.learning_curves import COLOUR, GREY, HEIGHT, ROOT, Panel, line, page, text
from benchmarks.results.against_trl import TrlRun
from benchmarks.results.tables import cell, row

CURVES, IMAGES = ROOT / "docs/curves/against_trl", ROOT / "docs/images"
AGAIN = [ROOT / "docs/curves/results"]
REACH = 2  # steps on either side over which a reward is averaged
LEVEL = 0.05  # reward between two levels
LAST = 10  # steps over which the reward at the end is averaged
PHASES = ("step_seconds", "rollout_seconds", "update_seconds")
COLOURS = {"Paddock": COLOUR["grpo"], "TRL": "#d98324"}

Document = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """Reward of each step of a run, and the minutes at which the step had ended."""

    minutes: list[float]
    raw: list[float]

    @classmethod
    def of(cls, document: Document) -> Curve:
        curves = document["curves"]
        return cls([seconds / 60 for seconds in curves["seconds"]], curves["reward"])

    @property
    def smoothed(self) -> list[float]:
        last = len(self.raw) - 1
        reaches = [min(REACH, place, last - place) for place in range(len(self.raw))]
        return [mean(self.raw[place - reach : place + reach + 1]) for place, reach in enumerate(reaches)]

    def at(self, minute: float) -> float | None:
        """Returns the smoothed reward at a time, between two steps on the line from one to the other; None outside."""
        known = list(zip(self.minutes, self.smoothed, strict=True))
        for (before, low), (after, high) in pairwise(known):
            if before <= minute <= after:
                return low + (high - low) * (minute - before) / (after - before)
        return None

    def reaches(self, level: float) -> float | None:
        """Returns the minute at which the smoothed reward is first as high as the level."""
        rewards = self.smoothed
        for place, found in enumerate(rewards):
            if found >= level:
                if place == 0:
                    return self.minutes[0]
                before, after, low = *self.minutes[place - 1 : place + 1], rewards[place - 1]
                return before + (after - before) * (level - low) / (found - low)
        return None


@dataclass(frozen=True)
class Pair:
    """Runs of one experiment with one seed: Paddock's and the other trainer's."""

    ours: Document
    theirs: Document
    again: tuple[Document, ...] = ()
    """More runs of Paddock's with the same seed."""

    @property
    def curves(self) -> tuple[Curve, Curve]:
        return Curve.of(self.ours), Curve.of(self.theirs)

    @property
    def label(self) -> str:
        return f"{self.ours['experiment']}, seed {self.ours['seed']}"

    def after_minutes(self) -> Iterator[list[str]]:
        """Label, minutes, and the reward of both in %, at each whole minute until the longer run ends."""
        last = max(curve.minutes[-1] for curve in self.curves)
        for minute in range(1, math.floor(last) + 1):
            rewards = [curve.at(minute) for curve in self.curves]
            yield [self.label, str(minute), *(cell([found and 100 * found]) for found in rewards)]

    def levels(self) -> Iterator[tuple[float, float, float]]:
        """Levels of reward that both reached, with the minutes until then: ours, theirs."""
        highest = min(max(curve.smoothed) for curve in self.curves)
        for number in range(1, math.floor(highest / LEVEL + 1e-9) + 1):
            ours, theirs = (curve.reaches(number * LEVEL) for curve in self.curves)
            if ours is not None and theirs is not None:
                yield number * LEVEL, ours, theirs

    def learning_per_minute(self) -> Iterator[list[str]]:
        """Label, level in %, and for both the minutes until it and the points gained per minute; at last the ratio.

        Both gains begin at the mean reward of the two first steps, which the same weights sampled.
        """
        start = mean(curve.raw[0] for curve in self.curves)
        for level, ours, theirs in self.levels():
            gains = [100 * (level - start) / minutes for minutes in (ours, theirs)]
            yield [self.label, f"{100 * level:.0f}", f"{ours:.2f}", f"{gains[0]:.1f}", f"{theirs:.2f}",
                   f"{gains[1]:.1f}", f"{theirs / ours:.1f}"]  # fmt: skip

    def at_equal_samples(self) -> Iterator[list[str]]:
        """Label, steps, mean reward of both in %, the difference with its standard error, and the mean reward of all of
        Paddock's runs with this seed: all steps, the last ten.

        Both sampled the same prompts at each step, so that differences of steps are the unit of chance within a run.
        """
        ours, theirs = (curve.raw for curve in self.curves)
        common = min(len(ours), len(theirs))
        for first in dict.fromkeys((0, max(0, common - LAST))):
            differences = [100 * (ours[place] - theirs[place]) for place in range(first, common)]
            error = f"{stdev(differences) / math.sqrt(len(differences)):.1f}" if len(differences) > 1 else "?"
            means = [f"{100 * mean(rewards[first:common]):.1f}" for rewards in (ours, theirs)]
            every = [100 * mean(Curve.of(run).raw[first:common]) for run in (self.ours, *self.again)]
            yield [self.label, f"{first + 1}-{common}", *means, f"{mean(differences):+.1f} ± {error}", cell(every)]

    def held_out(self) -> Iterator[list[str]]:
        """Label, then step and strict greedy accuracy in %: ours at the last validation until theirs, theirs, and that
        of Paddock's other runs with this seed at their step."""
        ours, theirs = self.ours["held_out"], self.theirs["held_out"]
        until = [place for place, step in enumerate(ours["step"]) if theirs["step"] and step <= theirs["step"][-1]]
        if until:
            cells = ((ours["step"][until[-1]], ours["strict"][until[-1]]), (theirs["step"][-1], theirs["strict"][-1]))
            found = [run["held_out"] for run in self.again if theirs["step"][-1] in run["held_out"]["step"]]
            again = [100 * one["strict"][one["step"].index(theirs["step"][-1])] for one in found]
            words = (word for step, share in cells for word in (str(step), f"{100 * share:.1f}"))
            yield [self.label, *words, cell(again or [None])]

    def cost(self) -> Iterator[list[str]]:
        """Label, trainer, steps, medians of a step and its phases in seconds, and minutes of the whole command."""
        for name, document in (("Paddock", self.ours), (self.theirs["trainer"], self.theirs)):
            curves = document["curves"]
            seconds = [f"{median(curves[phase]):.2f}" for phase in PHASES]
            yield [self.label, name, str(len(curves["step"])), *seconds, f"{document['command_seconds'] / 60:.1f}"]


TABLES = (Pair.after_minutes, Pair.learning_per_minute, Pair.at_equal_samples, Pair.held_out, Pair.cost)


def same(document: Document) -> Document:
    """Returns what two runs must have in common to be compared. Weights are known by their hash, not by a file."""
    weights = document["weights"] and document["weights"]["sha256"]
    return {name: document[name] for name in ("experiment", "seed", "device")} | {"weights": weights}


def pairs(folder: Path, others: Sequence[Path] = ()) -> list[Pair]:
    """Returns a pair for each of the other trainer's documents that has Paddock's beside it; `others`: folders of more
    runs of Paddock's."""
    found = []
    for path in sorted(folder.glob(f"{TrlRun.prefix}*.json")):
        beside = path.with_name(path.name.removeprefix(TrlRun.prefix))
        if not beside.is_file():
            continue
        files = [path, *(other / beside.name for other in others if (other / beside.name).is_file())]
        ours, theirs, *again = (json.loads(file.read_text()) for file in (beside, *files))
        for file, other in zip(files, (theirs, *again), strict=True):
            for name, value in same(ours).items():
                if same(other)[name] != value:
                    raise SystemExit(f"{file}: {name} is {same(other)[name]}, and {value} in {beside.name}")
        found.append(Pair(ours, theirs, tuple(again)))
    return found


def tables(found: list[Pair]) -> dict[str, list[str]]:
    """Name of a table -> its rows."""
    return {table.__name__: [row(cells) for pair in found for cells in table(pair)] for table in TABLES}


def draw(found: list[Pair]) -> str:
    """Left: reward against minutes. Right: against steps, as many samples for both. One experiment's pairs, by seed."""
    curves = [dict(zip(COLOURS, pair.curves, strict=True)) for pair in found]
    every = [curve for both in curves for curve in both.values()]
    top = math.ceil(10 * max(max(curve.smoothed) for curve in every) + 1e-9) / 10
    minutes = math.ceil(max(curve.minutes[-1] for curve in every))
    left = Panel(62, 462, minutes, "Reward of the training samples, by time", top, "minutes of training")
    right = Panel(540, 940, max(len(curve.raw) for curve in every), "The same, by step", top)
    first, trainer = found[0].ours, found[0].theirs["trainer"]
    parts = [
        text(
            20,
            34,
            f"{first['title']} on {first['model'].rpartition('/')[2]}: Paddock and {trainer}",
            size=19,
            weight=600,
        ),
        text(20, 57, f"{first['device']}, the same weights, prompts and settings; 5-step means.", size=13, fill=GREY),
    ]
    for place, (name, colour) in enumerate(COLOURS.items()):
        x = 720 + 110 * place
        parts.append(line(x, 53, x + 26, 53, colour, 'stroke-width="3" stroke-linecap="round"'))
        parts.append(text(x + 34, 57.5, name, size=13, weight=600))
    parts += [*left.axes(), *right.axes()]
    for both in curves:
        for name, curve in both.items():
            steps = range(1, len(curve.raw) + 1)
            parts.append(left.curve(curve.minutes, curve.smoothed, COLOURS[name]))
            parts.append(right.curve(steps, curve.smoothed, COLOURS[name]))
    return page(parts, HEIGHT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--again", type=Path, nargs="*", default=AGAIN, help="folders with more runs of Paddock's")
    options = parser.parse_args()
    found = pairs(options.curves, options.again)
    if not found:
        raise SystemExit(f"{options.curves} has no {TrlRun.prefix}NAME-SEED.json with NAME-SEED.json beside it")
    for name, rows in tables(found).items():
        print("\n".join([name, *rows, ""]))
    for name in sorted({pair.ours["experiment"] for pair in found}):
        picture = options.out / f"against_trl_{name}.svg"
        picture.write_text(draw([pair for pair in found if pair.ours["experiment"] == name]))
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
