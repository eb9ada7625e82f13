"""Print the rows of the tables in docs/*/results.md, from the committed runs.

    python -m benchmarks.results.tables [--curves docs/curves/results]

A cell that stands for several seeds has their mean and, in brackets, their range. `-` stands for what was not reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.results.pictures import CURVES, Run, methods, read

STEPS, FEW = (0, 20, 40, 60, 80), 50
"""Runs of more than FEW steps, up to the last of STEPS, share these columns; any other has those of its validations."""
MISSING = "-"
SAMPLED = ("mean@8", "pass@8")
PHASES = ("step_seconds", "rollout_seconds", "update_seconds")
WINDOW = 10  # steps over which the reward at the end is averaged


def greedy(runs: list[Run]) -> list[str]:
    """Title, seeds, accuracy after each number of steps, strict if there are two; and then lenient accuracy at step 0
    and a run's last one."""
    first, *others = methods(runs[0])
    own = sorted({step for run in runs for step in run["held_out"]["step"]})
    columns = STEPS if FEW < runs[0]["steps"] <= STEPS[-1] else own
    by_step = [cell(held_out(run, first, step) for run in runs) for step in columns]
    for name in others:
        by_step.append(cell(held_out(run, name, 0) for run in runs))
        by_step.append(cell(held_out(run, name, run["steps"]) for run in runs))
    return [runs[0]["title"], seeds(runs), *by_step]


def held_out(run: Run, method: str, step: int) -> float | None:
    found = run["held_out"]
    return 100 * found[method][found["step"].index(step)] if step in found["step"] else None


def sampled(runs: list[Run]) -> list[str]:
    """Title, then mean@8 and pass@8 of each method after training."""
    kinds = [(name, metric) for name in methods(runs[0]) for metric in SAMPLED]
    return [runs[0]["title"], *(cell(after(run, *kind) for run in runs) for kind in kinds)]


def after(run: Run, method: str, metric: str) -> float | None:
    return 100 * run["sampled"]["after"][method][metric] if "sampled" in run else None


def start(document: dict[str, Any]) -> list[str]:
    """The row of the model before training, as `sampled` has it."""
    return [f"{100 * found[metric]:.1f}" for found in document["accuracy"].values() for metric in SAMPLED]


def cost(runs: list[Run]) -> list[str]:
    """Title, steps, medians of a step and its phases, peak GiB, and minutes of all steps and of the whole command."""
    phases = (cell((median(run["curves"][name]) for run in runs), 2) for name in PHASES)
    return [
        runs[0]["title"],
        cell((len(run["curves"]["step"]) for run in runs), 0),
        *phases,
        cell((max(run["curves"]["memory_gib"]) for run in runs), 1),
        cell((run["curves"]["seconds"][-1] / 60 for run in runs), 1),
        cell((run["command_seconds"] / 60 for run in runs), 1),
    ]


def health(runs: list[Run]) -> list[str]:
    """Title, then at the first step and over the last ten: reward, tokens an answer, entropy; and the largest gap."""
    cells = [runs[0]["title"]]
    for name, scale, digits in (("reward", 100, 1), ("length", 1, 0), ("entropy", 1, 2)):
        cells.append(cell((scale * run["curves"][name][0] for run in runs), digits))
        cells.append(cell((scale * mean(run["curves"][name][-WINDOW:]) for run in runs), digits))
    return [*cells, cell((max(run["curves"]["gap"]) for run in runs), 4)]


def tools(runs: list[Run]) -> list[str]:
    """Title, steps made, then a conversation's calls and those that gave no result, at the first and the last step."""
    lost = [
        [sum(pair) for pair in zip(run["curves"]["malformed"], run["curves"]["failed"], strict=True)] for run in runs
    ]
    cells = [runs[0]["title"], cell((len(run["curves"]["step"]) for run in runs), 0)]
    for curves in ([run["curves"]["calls"] for run in runs], lost):
        cells += [cell((curve[place] for curve in curves), 2) for place in (0, -1)]
    return cells


def seeds(runs: list[Run]) -> str:
    return ", ".join(str(run["seed"]) for run in runs)


def cell(values: Iterable[float | None], digits: int = 1) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return MISSING
    low, middle, high = (f"{value:.{digits}f}" for value in (min(found), mean(found), max(found)))
    return middle if low == high else f"{middle} ({low}-{high})"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(folder: Path = CURVES) -> dict[str, list[str]]:
    """Name of a table -> its rows, those of the model before training without their first cell."""
    runs = read(folder)
    starts = [json.loads(path.read_text()) for path in sorted(folder.glob("start-*.json"))]
    rows = {table.__name__: [row(table(found)) for found in runs.values()] for table in (greedy, cost, health)}
    evaluated = [found for found in runs.values() if any("sampled" in run for run in found)]
    conversed = [found for found in runs.values() if "calls" in found[0]["curves"]]
    return {
        **rows,
        "sampled": [row(sampled(found)) for found in evaluated],
        "tools": [row(tools(found)) for found in conversed],
        "start": [row(start(document)) for document in starts],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=Path, default=CURVES)
    options = parser.parse_args()
    for name, rows in tables(options.curves).items():
        print("\n".join([name, *rows, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
