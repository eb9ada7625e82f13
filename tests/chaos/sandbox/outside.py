"""Scores a program as a training run does, and looks at the machine meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paddock.core.supervisor import descendants
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import ScoreRequest
from paddock.sandbox.program import CAUSES
from paddock.trainer.assembly import open_rewards

from .catalogue import Case

LOOK = 0.004  # seconds
DANGER = 4 << 30  # bytes: when the machine has lost so many, all is ended
SETTLE = 0.15  # seconds in which the machine frees what a program left
WATCHER = """
import os, signal, sys, time
def available():
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
owner, pause, danger = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
first = lowest = available()
print(first, flush=True)
os.set_blocking(0, False)
while os.getppid() == owner:
    lowest = min(lowest, available())
    if first - lowest > danger:
        os.kill(owner, signal.SIGUSR1)
        break
    try:
        if os.read(0, 1) == b"":
            break
    except BlockingIOError:
        pass
    time.sleep(pause)
print(lowest, flush=True)
"""


class InDanger(BaseException):
    """A program was about to take the whole machine."""


@dataclass(frozen=True)
class Outcome:
    cause: str
    score: float
    seconds: float
    peak: int
    """Bytes by which the machine's available memory fell, at most."""
    ended_the_run: str = ""
    """What a run would have ended with."""


@contextmanager
def manager(memory_mb: int, processes: int, seconds: float, command: bool = False) -> Iterator[RewardManager]:
    words = [
        f"reward_model.sandbox_fusion.memory_limit_mb={memory_mb}",
        f"reward_model.sandbox.processes={processes}",
        f"reward_model.sandbox.timeout={seconds}",
        "reward_model.num_workers=1",
    ]
    words += ["reward_model.sandbox.command=[sh,'{file}']"] if command else []
    with open_rewards(load(words).config) as rewards:
        yield rewards


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10


def watched(rewards: RewardManager, case: Case) -> Outcome:
    """Another process samples the machine's memory while the answer is scored."""
    request = ScoreRequest(case.source, case.answer, dict(case.truth))
    signal.signal(signal.SIGUSR1, _flee)
    watcher = subprocess.Popen(
        [sys.executable, "-S", "-c", WATCHER, str(os.getpid()), str(LOOK), str(DANGER)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watcher.stdout and watcher.stdin
    first = int(watcher.stdout.readline())
    start = time.monotonic()
    try:
        (score,) = rewards.score([request])
        ended, cause, value = "", _cause(score.extras), score.value
        if score.timed_out:
            cause = "scorer cut off"
    except UserError as error:
        ended, cause, value = str(error), "run ended", 0.0
    except InDanger:
        for pid in descendants(os.getpid()) - {watcher.pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    finally:
        seconds = time.monotonic() - start
        watcher.stdin.close()
    lowest = int(watcher.stdout.readline())
    watcher.stdout.close()
    watcher.wait()
    return Outcome(cause, value, seconds, first - lowest, ended)


def _flee(*_: object) -> None:
    raise InDanger


def _cause(extras: dict) -> str:
    return next((name for name in CAUSES if extras.get(f"sandbox/{name}")), "?")
