"""What the way through Ray costs: the same steps in this process and in one Ray worker, turn by turn in one run.

python benchmarks/ray_overhead.py [--rounds 3] [--steps 4] [--prompts 176]

A group of one trains with the same engine as one process, so the figure is what Ray itself costs: calls, sending rows
and getting answers back. A step is meant to take about two seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from paddock.config.topology import pools
from paddock.loading.load import load
from paddock.trainer.reinforcement import train
from paddock.workers import ray as ray_workers
from paddock.workers import roles

OPTIONS = [
    "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=8", "trainer.test_freq=-1", "trainer.device=cpu",
    "trainer.val_before_train=False", "trainer.logger=[file]", "trainer.n_gpus_per_node=1", "trainer.save_last=False",
]  # fmt: skip


def seconds(folder: Path, prompts: int, steps: int, through_ray: bool) -> list[dict[str, float]]:
    """Timings of each step but the first, which warms up."""
    roles.in_one_process = lambda config: not through_ray  # type: ignore[assignment]
    sizes = [f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 2}"]
    config = load([*OPTIONS, *sizes, f"trainer.total_training_steps={steps + 1}",
                   f"trainer.default_local_dir={folder}"]).config  # fmt: skip
    assert train(config).finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k.removeprefix("timing_s/"): v for k, v in row.items() if k.startswith("timing_s/")} for row in rows[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=176)
    options = parser.parse_args()
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    config = load(OPTIONS).config
    with tempfile.TemporaryDirectory() as folder, ray_workers.cluster(config, pools(config)):
        for number in range(2 * options.rounds):
            through_ray = number % 2 == 1
            here = Path(folder) / str(number)
            found[through_ray] += seconds(here, options.prompts, options.steps, through_ray)
    print(f"{'phase':<16} {'one process s':>14} {'Ray worker s':>14} {'difference s':>14}")
    for phase in found[False][0]:
        one, other = (statistics.median(step.get(phase, 0.0) for step in found[kind]) for kind in (False, True))
        print(f"{phase:<16} {one:>14.3f} {other:>14.3f} {other - one:>14.3f}")
    for name, pick in (("median", statistics.median), ("best", min)):
        one, other = (pick(step["step"] for step in found[kind]) for kind in (False, True))
        print(f"overhead of a {one:.2f} s step ({name}): {100 * (other / one - 1):.1f} %")


if __name__ == "__main__":
    main()
