"""Processes that score, each killed and replaced when one response takes too long.

A worker leads a process group of its own: a Ctrl-C in the terminal does not reach it, and killing it kills what it
started. It imports the scorer and nothing of the trainer, and ends by itself when the trainer is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from paddock.rewards.custom import Target
from paddock.rewards.score import Score, ScoreRequest
from paddock.rewards.worker import FAILED, READY

Job = tuple[Target, ScoreRequest]

LOADING = 300.0  # seconds a scorer may take to be imported
LARGEST_CHUNK = 32
CHUNKS_PER_WORKER = 4
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from paddock.rewards.worker import serve
serve(int(sys.argv[1]))"""


class JobFailed(Exception):
    """A job that gave no score, by its position."""

    def __init__(self, job: int, reason: str):
        super().__init__(reason)
        self.job, self.reason = job, reason


class Pool:
    """At most `size` processes, started when there is work for them. Any thread may use it; callers take turns."""

    def __init__(self, size: int, timeout: float):
        self.size, self.timeout = size, timeout
        self.workers: list[Worker] = []
        self._turn = threading.Lock()
        self._at_exit = weakref.finalize(self, stop, self.workers)

    def run(self, jobs: Sequence[Job]) -> list[Score | None]:
        """The score of each job, None where it was cut off; JobFailed at the first that gave none."""
        with self._turn:
            try:
                return self._run(jobs)
            except BaseException:
                stop(self.workers)  # what they still work on is nobody's
                raise

    def close(self) -> None:
        with self._turn:
            stop(self.workers)

    def _run(self, jobs: Sequence[Job]) -> list[Score | None]:
        scores: list[Score | None] = [None] * len(jobs)
        waiting = deque(chunks(jobs, self.size))
        while waiting or any(worker.jobs for worker in self.workers):
            self._give(waiting, jobs)
            busy = [worker for worker in self.workers if worker.jobs]
            wait([worker.connection for worker in busy], max(0.0, min(w.deadline for w in busy) - time.monotonic()))
            for worker in busy:
                for job, score in worker.answers(self.timeout):
                    scores[job] = score
                if worker.jobs and time.monotonic() >= worker.deadline:
                    waiting.extendleft([rest] if (rest := self._cut_off(worker)) else [])
        return scores

    def _give(self, waiting: deque[list[int]], jobs: Sequence[Job]) -> None:
        """Work for everyone who is idle. A worker that died since the last run is replaced."""
        for worker in [w for w in self.workers if not w.jobs and w.process.poll() is not None]:
            self._remove(worker)
        idle = [worker for worker in self.workers if not worker.jobs]
        while len(idle) < len(waiting) and len(self.workers) < self.size:
            self.workers.append(Worker())
            idle.append(self.workers[-1])
        for worker in idle[: len(waiting)]:
            worker.give(waiting.popleft(), jobs, self.timeout)

    def _cut_off(self, worker: Worker) -> list[int]:
        """Kills a worker whose time is up; returns the jobs it had not begun."""
        first, *rest = worker.jobs
        self._remove(worker)
        if not worker.loaded:
            raise JobFailed(first, f"was not imported within {LOADING:g} s")
        return rest

    def _remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.stop()


class Worker:
    """One process, and what it works on."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)]
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.connection = Connection(ours.detach())
        self.owner = os.getpid()
        self.jobs: deque[int] = deque()
        self.loaded = False
        self.deadline = 0.0

    def give(self, chunk: list[int], jobs: Sequence[Job], timeout: float) -> None:
        self.jobs, self.loaded, self.deadline = deque(chunk), False, time.monotonic() + LOADING
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: the answer that does not come tells
            self.connection.send((jobs[chunk[0]][0], timeout, [jobs[job][1] for job in chunk]))

    def answers(self, timeout: float) -> list[tuple[int, Score]]:
        """What has arrived. The clock of the next job starts when the one before it is answered."""
        arrived = []
        while self.jobs and self.connection.poll():
            try:
                kind, value = self.connection.recv()
            except (EOFError, ConnectionResetError):
                self._ended()
                break
            self.deadline = time.monotonic() + timeout
            if kind == READY:
                self.loaded = True
            elif kind == FAILED:
                raise JobFailed(self.jobs[0], value)
            else:
                arrived.append((self.jobs.popleft(), value))
        return arrived

    def _ended(self) -> None:
        code = self.process.wait()
        if code == -signal.SIGALRM:  # its own clock was first, because this process was held up
            self.deadline = 0.0
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        raise JobFailed(self.jobs[0], f"ended its process, which {how}")

    def stop(self) -> None:
        self.connection.close()
        if os.getpid() != self.owner:  # a fork of the trainer ends, not the trainer
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def stop(workers: list[Worker]) -> None:
    while workers:
        workers.pop().stop()


def chunks(jobs: Sequence[Job], workers: int) -> list[list[int]]:
    """Runs of neighbouring jobs with one target, small enough that every worker gets several."""
    size = max(1, min(LARGEST_CHUNK, len(jobs) // (workers * CHUNKS_PER_WORKER)))
    found: list[list[int]] = []
    for job, (target, _) in enumerate(jobs):
        if found and len(found[-1]) < size and jobs[found[-1][0]][0] is target:
            found[-1].append(job)
        else:
            found.append([job])
    return found
