"""How much a few settings matter: the embedded default with one of them changed at a time.

    python benchmarks/sweep.py [--only NAME ...] [--seed 1] [--out docs/curves/sweep.json]

Each variant is measured as in learning_curves.py, whose runs of the same seed are what to compare with. Every one sees
512 samples a step for 80 steps: where n changes, the number of prompts changes with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from learning_curves import ROOT, conditions, measure, summary

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SAMPLES, STEPS = 512, 80


def groups_of(n: int) -> tuple[str, ...]:
    prompts = SAMPLES // n
    return f"{ROLLOUT}.n={n}", f"data.train_batch_size={prompts}", f"{ACTOR}.ppo_mini_batch_size={prompts}"


VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{f"grpo n={n}": ("grpo", groups_of(n)) for n in (2, 4, 16)},
    "grpo lr=1.5e-4": ("grpo", (f"{ACTOR}.optim.lr=1.5e-4",)),
    "grpo lr=1.5e-3": ("grpo", (f"{ACTOR}.optim.lr=1.5e-3",)),
    "grpo not divided by std": ("grpo", ("algorithm.norm_adv_by_std_in_grpo=False",)),
    "rloo kl=0": ("rloo", ("algorithm.kl_ctrl.kl_coef=0",)),
    "rloo kl=0.01": ("rloo", ("algorithm.kl_ctrl.kl_coef=0.01",)),
    "ppo critic lr=3e-4": ("ppo", ("critic.optim.lr=3e-4",)),
    "ppo critic lr=3e-3": ("ppo", ("critic.optim.lr=3e-3",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "curves" / "sweep.json")
    options = parser.parse_args()
    document: dict[str, Any] = {**conditions(), "steps": STEPS, "runs": []}
    for name in options.only:
        algorithm, overrides = VARIANTS[name]
        with tempfile.TemporaryDirectory() as folder:
            run = measure(algorithm, options.seed, STEPS, Path(folder), *overrides)
        document["runs"].append({"name": name, **run})
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{name}: {summary(run)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
