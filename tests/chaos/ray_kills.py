"""Kills ranks of a Ray run in every phase; the run restarts by itself and ends as the run that nobody touched.

python -m tests.chaos.ray_kills --kills 24         # writes docs/reliability/kills.json; needs the extra `ray`
PADDOCK_TESTS_DEVICE=cuda python -m tests.chaos.ray_kills --kills 30 --ranks 4 --no-record      # ranks that share a GPU
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
from tests.devices import ON_DEVICE

PHASES = ("loading", "rollout.wake", "rollout.answer", "rollout.sleep", "actor.forward", "critic.forward",
          "critic.learn", "actor.learn",
          "actor.save", "critic.save", "memory")  # fmt: skip
KEYS = [*RL, "algorithm.adv_estimator=gae", *ON_DEVICE]
INSIDE = 0.2
"""Seconds after the start of a phase, within which a rank is killed."""


@contextmanager
def killing(phases: list[tuple[str, int, float]]) -> Iterator[tuple[list[str], set[int]]]:
    """Kills ranks, one after the other, some seconds after the driver has begun to wait for them in a phase. Yields the
    phases in which ranks have been killed, and the ids of all processes of ranks."""
    gather, left, done, pids = cluster.RayRanks.gather, list(phases), list[str](), set[int]()

    def wait_and_kill(group: Any, futures: Any, phase: str, arrived: Any = None) -> Any:
        pids.update(group.pids)
        if left and phase == left[0][0]:
            _, rank, seconds = left.pop(0)
            done.append(phase)
            time.sleep(seconds)
            os.kill(group.pids[rank], signal.SIGKILL)
        return gather(group, futures, phase, arrived)

    cluster.RayRanks.gather = wait_and_kill  # type: ignore[method-assign]
    try:
        yield done, pids
    finally:
        cluster.RayRanks.gather = gather  # type: ignore[method-assign]


def outliving(pids: set[int], seconds: float = 20.0) -> list[int]:
    """Returns the processes that have not ended within some seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def trial(work: Path, dice: random.Random, kills: int, ranks: int) -> Counter[str]:
    """Runs once untouched and once with kills; returns the phases in which ranks were killed, by count."""
    for name in ("untouched", "killed"):
        folder = work / name
        keys = [*(word.format(folder=folder) for word in KEYS), f"trainer.n_gpus_per_node={ranks}"]
        chosen = [(dice.choice(PHASES), dice.randrange(ranks), dice.uniform(0, INSIDE))
                  for _ in range(kills if name == "killed" else 0)]  # fmt: skip
        restarts = [f"trainer.max_restarts={kills}", f"trainer.default_local_dir={folder}"]
        with killing(chosen) as (done, pids):
            assert train(load([*keys, *restarts], chooses=True).config).finished
        left = outliving(pids)
        assert not left, f"processes of ranks that outlived the run: {left}"
    differences = list(compare(work / "untouched", work / "killed"))
    assert not differences, f"after {done}: {differences[:5]}"
    return Counter(f"rank in {phase}" for phase in done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    began, died, trials, dice = time.monotonic(), Counter[str](), 0, random.Random(args.seed)
    ray.init(num_cpus=args.ranks, **cluster.LOCAL)
    while died.total() < args.kills:
        with tempfile.TemporaryDirectory() as folder:
            died += trial(Path(folder), dice, min(8, args.kills - died.total()), args.ranks)
        trials += 1
        print(f"ray: {died.total()} ranks killed in {trials} runs, each ended as the untouched run", flush=True)
    if not args.no_record:
        record("ray", died, trials, args.seed, time.monotonic() - began)


if __name__ == "__main__":
    main()
