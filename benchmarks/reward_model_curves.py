"""Train a reward model on the built-in preference pairs, then PPO with it alone, on several seeds; write both curves.

    python -m benchmarks.reward_model_curves [--seeds 1 2 3] [--out docs]

Each run is the commands of examples/ppo_trainer/run_tiny_rm.sh on one thread. Writes OUT/curves/reward_model.json after
every run. Accuracy is that of the rule, which training never sees: `greedy` and `sampled` of sums that neither the
reward model nor the policy was trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.learning_curves import GREEDY, ROOT, children_seconds, conditions, sampled_accuracy

SCRIPT = ROOT / "examples/ppo_trainer/run_tiny_rm.sh"
OPINION = "val-aux/paddock/addition/model_score/mean@1"

Run = dict[str, Any]


def measure(seed: int, folder: Path) -> Run:
    """The script with this seed: accuracy of the reward model on held-out pairs, PPO's curve, and what it gained."""
    wall, cpu = time.monotonic(), children_seconds()
    run_script(seed, folder)
    wall, cpu = time.monotonic() - wall, children_seconds() - cpu
    learnt, lines = (metrics(folder / name) for name in ("reward_model", "ppo"))
    updates = [line for line in lines if line["step"] > 0]
    steps = updates[-1]["step"]
    validations = {str(line["step"]): line for line in lines if GREEDY in line}
    return {
        "seed": seed,
        "pairs": {str(line["step"]): line["val/accuracy"] for line in learnt if "val/accuracy" in line},
        "reward": [line["reward/model/mean"] for line in updates],
        "greedy": {step: line[GREEDY] for step, line in validations.items()},
        "opinion": {step: line[OPINION] for step, line in validations.items()},
        "sampled": {
            "before": sampled_accuracy("builtin:tiny", seed, folder),
            "after": sampled_accuracy(f"{folder}/ppo/global_step_{steps}/actor", seed, folder),
        },
        "seconds": {"script": round(wall, 1), "script_cpu": round(cpu, 1)},
    }


def run_script(seed: int, folder: Path) -> None:
    """What it says is shown only if it fails."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"OUT": str(folder), "SEED": str(seed), "PADDOCK": f"{sys.executable} -m paddock.cli", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{SCRIPT}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(run: Run) -> str:
    pairs, greedy, sampled = list(run["pairs"].values()), list(run["greedy"].values()), run["sampled"]
    return (
        f"seed {run['seed']}: pairs {pairs[-1]:.1%}, sampled {sampled['before']:.1%} -> {sampled['after']:.1%}, "
        f"greedy {greedy[0]:.1%} -> {greedy[-1]:.1%}, {run['seconds']['script_cpu']:.0f} s of processor time"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    file = options.out / "curves/reward_model.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {**conditions(), "command": "examples/ppo_trainer/run_tiny_rm.sh", "runs": []}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            run = measure(seed, Path(folder))
        document["runs"].append(run)
        file.write_text(json.dumps(document, indent=1) + "\n")
        print(summary(run), flush=True)
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
