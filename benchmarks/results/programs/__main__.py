"""Write problems of our own as rows for training: functions to complete, as `paddock data humaneval` writes them.

    python -m benchmarks.results.programs --out DATA --held-out HumanEval.jsonl.gz
    paddock data humaneval --local_save_dir DATA

The first command writes DATA/train.parquet, DATA/own_test.parquet, which has further problems of the same families, and
DATA/programs.json, which says what they are. `--held-out` compares them with HumanEval, whose problems the second
command writes beside them as DATA/test.parquet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results.programs import (  # noqa: F401  each registers its families
    formats,
    grids,
    lists,
    mappings,
    numbers,
    parsing,
    plain,
    recursion,
    simulation,
    spans,
    texts,
)
from benchmarks.results.programs.held_out import compared
from benchmarks.results.programs.problem import FAMILIES, Draw, Family, Problem
from paddock.data.prepare import humaneval
from paddock.data.prepare.preparer import with_origin
from paddock.data.prepare.records import Record
from paddock.data.prepare.write import write_splits
from paddock.errors import EXIT_CODE, UserError

SOURCE = "paddock/programs"
PER_FAMILY = 32  # most problems of a family
UNSEEN = 2  # problems of a family that are not trained on
TRIES = 20  # draws for each problem that is wanted: rules that were drawn before are drawn again
HINTS, SHOWN = ("builtin", "typing", "typing", "none"), ("session", "session", "equal", "returns")

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A problem as it is asked, with the tests that judge an answer."""

    task_id: str
    problem: Problem
    prompt: str

    def row(self, split: str, index: int) -> Row:
        """As HumanEval's rows are, but for the source."""
        values = {
            **{"task_id": self.task_id, "prompt": self.prompt},
            **{"test": self.problem.test(), "entry_point": self.problem.name},
        }
        return {**with_origin(humaneval.row(Record(values, self.task_id)), split, index), "data_source": SOURCE}


def tasks_of(name: str, family: Family, seed: int, most: int = PER_FAMILY) -> Iterator[Task]:
    """Problems of a family with different solutions. One whose tests tell too little is left out."""
    found: set[str] = set()
    for attempt in range(TRIES * most):
        draw = Draw(f"{seed} {name} {attempt}")
        problem = family(draw)
        if problem.body in found or not problem.is_tested():
            continue
        found.add(problem.body)
        yield Task(f"{name}/{len(found)}", problem, problem.prompt(draw.one(*HINTS), draw.one(*SHOWN)))
        if len(found) == most:
            return


def splits(seed: int, most: int = PER_FAMILY) -> dict[str, list[Task]]:
    """The tasks to train on, in a drawn order, and those of the same families that are not trained on."""
    tasks = [list(tasks_of(name, family, seed, most)) for name, family in FAMILIES.items()]
    found = {
        "train": [task for own in tasks for task in own[:-UNSEEN]],
        "own_test": [task for own in tasks for task in own[-UNSEEN:]],
    }
    for chosen in found.values():
        Draw(seed).shuffle(chosen)
    return found


def about(found: dict[str, list[Task]], seed: int, held_out: Path | None) -> dict[str, Any]:
    prompts: dict[str, set[str]] = {}
    for task in (task for tasks in found.values() for task in tasks):
        prompts.setdefault(task.problem.name, set()).add(task.prompt)
    return {
        **{"seed": seed, "families": len(FAMILIES), "names": len(prompts)},
        **{split: len(tasks) for split, tasks in found.items()},
        "held_out": held_out and compared(prompts, held_out),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m benchmarks.results.programs")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--held-out", type=Path, help="HumanEval.jsonl.gz, with which our problems may share nothing")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = splits(options.seed)
    try:
        facts = about(found, options.seed, options.held_out)
        rows = {split: [task.row(split, place) for place, task in enumerate(tasks)] for split, tasks in found.items()}
        write_splits(options.out, rows, humaneval.COLUMNS)
    except UserError as error:
        print(f"programs: {error}", file=sys.stderr)
        return EXIT_CODE
    (options.out / "programs.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
