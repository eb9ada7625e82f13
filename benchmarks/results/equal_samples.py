"""Train the embedded default by TRL and by Paddock, several seeds each on a CPU, and compare rewards at equal samples.

    python -m benchmarks.results.equal_samples --seeds 8 --steps 40 --file FILE      # needs TRL

Two runs of a seed differ by the answers that they happen to draw. Where a run takes a minute, there can be enough of
them to tell chance from a difference of the trainers. Both have the prompts of a step in common, by the seed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.learning_curves import ROOT, conditions, run_module
from benchmarks.results.__main__ import commit
from benchmarks.results.comparison import LAST
from benchmarks.results.records import curves, write
from benchmarks.results.tables import cell, row

FILE = ROOT / "docs/curves/against_trl/equal_samples.json"
KEYS = ["algorithm.adv_estimator=grpo", "trainer.device=cpu"]
PADDOCK = ["paddock.cli", "train", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.logger=[console]"]
TRL = ["benchmarks.results.trl_training", "--seconds=inf", "--micro-batch=512", "--weights=float32"]

Document = dict[str, Any]


def trained(module: list[str], seed: int, steps: int) -> Document:
    """Returns reward and seconds of each step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"trainer.seed={seed}", f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}"]
        run_module(*module, *KEYS, *own)
        found = curves(Path(folder) / "metrics.jsonl")
    return {"seed": seed, "reward": found["reward"], "step_seconds": round(median(found["step_seconds"]), 3)}


def rows(document: Document) -> list[str]:
    """Rows of a table: steps, mean reward of both in %, with the range of the seeds, and the mean difference of a seed
    with its standard error; all steps, and the last ten."""
    found = []
    for first in (0, document["steps"] - LAST):
        ours, theirs = ([100 * mean(run["reward"][first:]) for run in document[name]] for name in ("paddock", "trl"))
        differences = [one - other for one, other in zip(ours, theirs, strict=True)]
        error = stdev(differences) / math.sqrt(len(differences))
        words = [f"{first + 1}-{document['steps']}", cell(ours), cell(theirs)]
        found.append(row([*words, f"{mean(differences):+.1f} ± {error:.1f}"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    document = {
        "command": f"python -m benchmarks.results.equal_samples --seeds {options.seeds} --steps {options.steps}",
        **{**conditions(), "trl_version": version("trl"), "commit": commit(), "steps": options.steps},
        **{"paddock": [], "trl": []},
    }
    for seed in range(1, options.seeds + 1):
        for name, module in (("paddock", PADDOCK), ("trl", TRL)):
            document[name].append(trained(module, seed, options.steps))
            print(seed, name, document[name][-1]["step_seconds"], "s a step", flush=True)
        write(document, options.file)
    print(*rows(document), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
