"""How long an answer takes: a wrong key, a wrong type, an impossible batch, a plan. Best of several runs.

python benchmarks/launch.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

COMMANDS = {
    "misspelt key": ["train", "data.train_bath_size=512"],
    "wrong type": ["train", "data.train_batch_size=many"],
    "impossible batch": [
        "train",
        "algorithm.adv_estimator=rloo",
        "data.train_batch_size=10",
        "trainer.n_gpus_per_node=8",
    ],
    "missing file": ["train", "trainer.device=cpu", "data.train_files=/nowhere/x.parquet"],
    "plan": ["plan", "algorithm.adv_estimator=rloo", "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct"],
}


def measure(arguments: list[str], repeats: int) -> tuple[float, float]:
    """Least wall and processor seconds."""
    walls, processors = [], []
    for _ in range(repeats):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-m", "paddock.cli", *arguments], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - start)
        processors.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(processors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"{'answer':<20} {'wall s':>8} {'CPU s':>8}")
    for name, arguments in COMMANDS.items():
        wall, processor = measure(arguments, repeats)
        print(f"{name:<20} {wall:>8.2f} {processor:>8.2f}")


if __name__ == "__main__":
    main()
