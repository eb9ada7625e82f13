"""Print the rows of the tables in docs/*/results.md, from the committed runs.

    python -m benchmarks.results.tables [--curves docs/curves/results]

A cell that stands for several seeds has their mean and, in brackets, their range. `-` stands for what was not reached.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from math import sqrt
from pathlib import Path
from statistics import mean, median, variance
from typing import Any

from benchmarks.results.pictures import CURVES, Run, methods, read

STEPS, FEW = (0, 20, 40, 60, 80), 50
"""Runs of more than FEW steps, up to the last of STEPS, share these columns; any other has those of its validations."""
MISSING = "-"
SAMPLED = ("mean@8", "pass@8")
PHASES = ("step_seconds", "rollout_seconds", "update_seconds")
WINDOW = 10  # steps over which the reward at the end is averaged
BASE = "grpo-0.5b"
"""The experiment beside which its kin are set: those of the same model and as many steps."""
SURE = 2.45  # standard errors: chance goes beyond so many once in twenty times, with a spread known by six numbers


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


def beside(runs: dict[str, list[Run]]) -> list[list[str]]:
    """Title, seeds, then how far BASE's kin end from it in greedy accuracy, mean@8 and pass@8, each counted strictly
    and with a standard error; bold beyond `SURE` of them. Nothing without several seeds of one of them.

    The error is that of other seeds on the same problems. Their spread is taken to be the same for all experiments, and
    pooled from those with several seeds.
    """
    like = {(found[0]["model"], found[0]["steps"]) for name, found in runs.items() if name == BASE}
    alike = {
        name: found
        for name, found in runs.items()
        if (found[0]["model"], found[0]["steps"]) in like
        and all("sampled" in run and "warm_up" not in run for run in found)
    }
    several = [found for found in alike.values() if len(found) > 1]
    if BASE not in alike or not several:
        return []
    rows = {name: [found[0]["title"], seeds(found)] for name, found in alike.items() if name != BASE}
    for kind in range(1 + len(SAMPLED)):
        ends = {name: [strict_ends(run)[kind] for run in found] for name, found in alike.items()}
        free = sum(len(found) - 1 for found in several)
        spread = sqrt(sum(variance(values) * (len(values) - 1) for values in ends.values() if len(values) > 1) / free)
        for name, cells in rows.items():
            cells.append(apart(ends[name], ends[BASE], spread))
    return list(rows.values())


def strict_ends(run: Run) -> list[float]:
    """Strict accuracies after the last step, in %: greedy, mean@8 and pass@8."""
    shares = [run["held_out"]["strict"][-1], *(run["sampled"]["after"]["strict"][metric] for metric in SAMPLED)]
    return [100 * share for share in shares]


def apart(values: list[float], others: list[float], spread: float) -> str:
    difference, error = mean(values) - mean(others), spread * sqrt(1 / len(values) + 1 / len(others))
    shown = f"{difference:+.1f} ± {error:.1f}"
    return f"**{shown}**" if abs(difference) > SURE * error else shown


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
        "beside": [row(cells) for cells in beside(runs)],
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
