"""Kills ranks of a Ray run in every phase; the run restarts by itself and ends as the run that nobody touched.

python -m tests.chaos.ray_kills --kills 24         # writes docs/reliability/kills.json; needs the extra `ray`
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import ray

from paddock.loading.load import load
from paddock.trainer.reinforcement import train
from paddock.workers import ray as cluster
from tests.chaos.kills import RL, compare, record

RANKS = 2
PHASES = ("loading", "rollout.wake", "rollout.answer", "rollout.sleep", "actor.forward", "critic.forward",
          "critic.learn", "actor.learn",
          "actor.save", "critic.save", "memory")  # fmt: skip
KEYS = [*RL, "algorithm.adv_estimator=gae", "trainer.device=cpu", f"trainer.n_gpus_per_node={RANKS}"]


@contextmanager
def killing(phases: list[tuple[str, int]]) -> Iterator[list[str]]:
    """Kills a rank when the driver waits for it in a phase, one after the other; yields those that have been."""
    gather, left, done = cluster.RayRanks.gather, list(phases), list[str]()

    def wait_and_kill(group: Any, futures: Any, phase: str, arrived: Any = None) -> Any:
        if left and phase == left[0][0]:
            done.append(phase)
            os.kill(group.pids[left.pop(0)[1]], signal.SIGKILL)
        return gather(group, futures, phase, arrived)

    cluster.RayRanks.gather = wait_and_kill  # type: ignore[method-assign]
    try:
        yield done
    finally:
        cluster.RayRanks.gather = gather  # type: ignore[method-assign]


def trial(work: Path, dice: random.Random, kills: int) -> Counter[str]:
    """Runs once untouched and once with kills; returns the phases in which ranks were killed, by count."""
    for name in ("untouched", "killed"):
        folder = work / name
        keys = [word.format(folder=folder) for word in KEYS]
        chosen = [(dice.choice(PHASES), dice.randrange(RANKS)) for _ in range(kills if name == "killed" else 0)]
        restarts = [f"trainer.max_restarts={kills}", f"trainer.default_local_dir={folder}"]
        with killing(chosen) as done:
            assert train(load([*keys, *restarts]).config).finished
    differences = list(compare(work / "untouched", work / "killed"))
    assert not differences, f"after {done}: {differences[:5]}"
    return Counter(f"rank in {phase}" for phase in done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    began, died, trials, dice = time.monotonic(), Counter[str](), 0, random.Random(args.seed)
    ray.init(num_cpus=RANKS, **cluster.LOCAL)
    while died.total() < args.kills:
        with tempfile.TemporaryDirectory() as folder:
            died += trial(Path(folder), dice, min(8, args.kills - died.total()))
        trials += 1
        print(f"ray: {died.total()} ranks killed in {trials} runs, each ended as the untouched run", flush=True)
    if not args.no_record:
        record("ray", died, trials, args.seed, time.monotonic() - began)


if __name__ == "__main__":
    main()
