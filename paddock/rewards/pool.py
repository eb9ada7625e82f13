"""Processes that score, each killed with all it started, and replaced, when one response takes too long.

A worker is the child of a supervisor (see supervisor.py) in a session of its own: a Ctrl-C in the terminal does not
reach it. It imports the scorer and nothing of the trainer, and is killed when the trainer is gone.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from paddock.core.supervisor import PATIENCE
from paddock.rewards.channel import Channel
from paddock.rewards.functions import Target
from paddock.rewards.score import ScoreRequest
from paddock.rewards.worker import READY, RECALL, RETURNED, SCORED, TOOK, ScoringFailure

LOADING = 300.0  # seconds a scorer may take to be imported
SENDING = 5  # seconds in which a worker must take what it is sent
GRACE = 2.0  # seconds beyond the limit, in which a worker interrupts a coroutine by itself
BUSY = 0.1  # seconds for which all workers work before there are more of them
LARGEST_CHUNK = 32
CHUNKS_PER_WORKER = 4
QUICK = 0.01  # seconds for the calls of a chunk; as long as they take less, chunks grow, at most to twice the size;
# a call that takes longer by itself gives those behind it to idle workers
LEAST_QUICK_CHUNK = 2
LARGEST_QUICK_CHUNK = 512
GATHERING = 0.0005  # seconds in which answers of a quick chunk gather before they are read
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[4])
from paddock.core.supervisor import main
main(*map(int, sys.argv[1:4]), "paddock.rewards.worker")"""


class JobFailed(Exception):
    """A job that gave no score: its position among those waited for, and in a batch the row."""

    def __init__(self, failure: ScoringFailure, job: int = 0):
        super().__init__(failure.reason)
        self.failure, self.job = failure, job


def answers_of(futures: Sequence[Future[Any]]) -> list[Any]:
    """Returns the results of jobs that are done; raises the first failure, with the job's index."""
    for index, future in enumerate(futures):
        if future.done() and isinstance(error := future.exception(), JobFailed):
            raise JobFailed(error.failure, index) from None
    return [future.result() for future in futures]


@dataclass(eq=False)
class ScoringJob:
    target: Target
    requests: tuple[ScoreRequest, ...]
    """One, or all that a function of whole batches is called with; without any the function's shape is asked for."""
    limit: float = inf
    """Seconds for this job, if the pool's time limit is not less."""
    future: Future[Any] = field(default_factory=Future)
    deadline: float = inf
    started: bool = False
    """The scorer is loaded, and it is this job's turn."""
    retries: int = 0
    not_before: float = 0.0
    shared: bool = False
    """Another job was in its process."""
    alone: bool = False
    """True if it gets a process that has no other job."""


class ProcessPool:
    """Runs jobs in at most `size` processes; doubles their number while all are busy and jobs wait. `submit` is
    thread-safe.

    Rules score a batch before a second process could start, so it is never started for them.

    A thread hands out the work, and owns all but what is submitted. It lives while there is work, so that a pool which
    nobody holds any more is collected.
    """

    late = "its process was killed"
    """What becomes of a call that takes too long."""
    room = 1
    """Calls that a worker holds at a time, each with a clock of its own; 1: a chunk of calls, one after the other."""

    def __init__(self, size: int, timeout: float, prints: Path | None = None):
        """`prints`: the file that takes what scorers print; None: the standard output of this process."""
        self.size, self.timeout, self.prints = size, timeout, prints
        self.told = False
        """Whoever collects scores has told of a call that took too long."""
        self.workers: list[Worker] = []
        self.waiting: deque[ScoringJob] = deque()
        self._submitted: list[ScoringJob] = []
        self._quick: dict[Target, int] = {}
        """The chunk size that a scorer's speed allows; 0 once a call of it was cut off, and then for good."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._dropping = False
        self._more_at = 0.0  # when there may be more workers
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._at_exit = weakref.finalize(self, stop, self.workers)

    def submit(self, jobs: Sequence[ScoringJob]) -> None:
        """Begins at once. A job's future gives its scores, None if it was cut off, or JobFailed."""
        if not jobs:
            return
        with self._lock:
            self._submitted += jobs
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
                self._thread.start()
            else:
                self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it rings already
            self._wake_writer.send(b".")

    def results(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Returns the results of these jobs, in order. A failure, or a Ctrl-C, ends everything that the pool still
        works on."""
        try:
            wait_for(futures, return_when=FIRST_EXCEPTION)
            return answers_of(futures)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Drops all work, and the processes that are at it."""
        with self._lock:
            thread, self._dropping = self._thread, self._thread is not None
            if thread:
                self._wake()
        if thread:
            thread.join()

    def close(self) -> None:
        self.cancel()
        stop(self.workers)

    def _serve(self) -> None:
        self._more_at = time.monotonic() + BUSY
        try:
            while self._turn():
                pass
        except BaseException as error:  # a mistake in here: whoever waits must hear of it
            with self._lock:
                self._drop(error)
                self._thread = None

    def _turn(self) -> bool:
        """Gives out work, waits for what happens next, and deals with it; False once there is nothing left to do."""
        with self._lock:
            self.waiting.extend(self._submitted)
            self._submitted = []
            if self._dropping:
                self._drop(None)
            if not self.waiting and not any(worker.jobs for worker in self.workers):
                self._thread = None
                return False
        self._give()
        busy = [worker for worker in self.workers if worker.jobs]
        wait(
            [self._wake_reader, *(worker.channel.socket for worker in busy)], max(0.0, self._next() - time.monotonic())
        )
        if any(len(worker.jobs) > LARGEST_CHUNK for worker in busy):
            time.sleep(GATHERING)
        with suppress(BlockingIOError):
            self._wake_reader.recv(65536)
        for worker in busy:
            self._listen(worker)
        return True

    def _next(self) -> float:
        """Returns the time of the next deadline, if nothing happens before."""
        more = self._more_at if self.waiting and len(self.workers) < self.size else inf
        slow = min((worker.slow_at for worker in self.workers if len(worker.jobs) > 1), default=inf)
        deadlines = (job.deadline for worker in self.workers for job in worker.jobs.values())
        return min(more, slow if self._has_room() else inf, *deadlines)

    def _give(self) -> None:
        """Work for everyone who is idle. A worker that died since it last worked is replaced."""
        idle = self._idle()
        hired = max(1, min(2 * len(self.workers), self.size)) if self._crowded(idle) else len(self.workers)
        while self.waiting and (idle or len(self.workers) < hired):
            worker = idle.pop() if idle else self._hire()
            self._send(worker, self._chunk())
        if self._has_room():
            self._recall()

    def _has_room(self) -> bool:
        """True if nothing waits, and another worker could work."""
        return not self.waiting and (len(self.workers) < self.size or not all(worker.jobs for worker in self.workers))

    def _recall(self) -> None:
        """Asks workers whose present call takes long for the calls behind it: each returns them when that call is
        done."""
        now = time.monotonic()
        for worker in self.workers:
            if len(worker.jobs) > 1 and worker.slow_at <= now:
                worker.slow_at, worker.recalled = inf, True
                with suppress(BrokenPipeError, ConnectionResetError):  # it died: the answer that does not come tells
                    worker.channel.send(RECALL)

    def _crowded(self, idle: list[Worker]) -> bool:
        """Have all workers had work for a while? Not while one of them is still loading its scorer. Those between two
        calls of a slow scorer are not idle, if more calls wait."""
        now = time.monotonic()
        loading = any(not next(iter(worker.jobs.values())).started for worker in self.workers if worker.jobs)
        if loading or (idle and not (len(self.waiting) > len(idle) and self._is_slow(self.waiting[0].target))):
            self._more_at = now + BUSY
        return not self.workers or now >= self._more_at

    def _is_slow(self, target: Target) -> bool:
        """True if one call of the scorer took as long as a chunk of quick ones may."""
        return self._quick.get(target, LEAST_QUICK_CHUNK) < LEAST_QUICK_CHUNK

    def _idle(self) -> list[Worker]:
        for worker in [w for w in self.workers if not w.jobs and w.channel.has_something()]:  # it can only be the end
            self._remove(worker)
        return [worker for worker in self.workers if not worker.jobs]

    def _hire(self) -> Worker:
        self.workers.append(Worker(self.room, self.prints))
        return self.workers[-1]

    def _chunk(self) -> list[ScoringJob]:
        """Takes neighbouring jobs with one target, few enough that every worker gets several chunks; of a quick scorer
        more than that, up to an equal share of what waits for each worker that there is; half a share of few jobs, so
        that one that hangs has fewer behind it."""
        fair = min(LARGEST_CHUNK, len(self.waiting) // (self.size * CHUNKS_PER_WORKER))
        shares = len(self.workers) * (1 if len(self.waiting) > LARGEST_CHUNK else 2)
        quick = min(self._quick.get(self.waiting[0].target, 0), -(-len(self.waiting) // shares))
        size = max(fair, quick)
        chunk = [self.waiting.popleft()]
        alone = len(chunk[0].requests) != 1
        while self.waiting and len(chunk) < size and not alone and self.waiting[0].target == chunk[0].target:
            chunk.append(self.waiting.popleft())
        return chunk

    def _send(self, worker: Worker, jobs: list[ScoringJob]) -> None:
        numbered = {next(self._numbers): job for job in jobs}
        for job in jobs:
            job.started, job.deadline = False, inf
        jobs[0].deadline = time.monotonic() + LOADING
        worker.jobs.update(numbered)
        worker.chunk, worker.sent, worker.took = len(jobs), time.monotonic(), inf
        worker.slow_at, worker.recalled = inf, False
        calls = [(number, job.requests) for number, job in numbered.items()]
        try:
            worker.channel.send((jobs[0].target, self.timeout, calls))
        except BlockingIOError:
            jobs[0].started, jobs[0].deadline = True, 0.0  # it takes nothing: it hangs
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died: the answer that does not come tells

    def _listen(self, worker: Worker) -> None:
        """Reads what has arrived from a worker; then ends it if its time is up."""
        try:
            for kind, number, value in worker.channel.arrived():
                self._heard(worker, kind, number, value)
        except (EOFError, ConnectionResetError):
            self._ended(worker)
        if any(job.deadline <= time.monotonic() for job in worker.jobs.values()):
            self._cut_off(worker)

    def _heard(self, worker: Worker, kind: str, number: int, value: Any) -> None:
        if kind == TOOK:
            worker.took = value
            return
        if kind == RETURNED:
            self.waiting.extendleft(worker.jobs.pop(number) for number in reversed(value))
            worker.chunk -= len(value)
            return
        if kind == READY:
            self._more_at += time.monotonic() - worker.sent  # while it loads its scorer, nobody is busy
        else:
            job = worker.jobs.pop(number)
            if kind == SCORED:
                job.future.set_result(value)
            else:
                job.future.set_exception(JobFailed(value))
            if not worker.jobs:
                self._time(worker, job.target)
        for job in itertools.islice(worker.jobs.values(), 1):  # the clock of a job starts when the one before is done
            now = time.monotonic()
            job.started, job.deadline = True, now + min(self.timeout, job.limit)
            worker.slow_at = inf if worker.recalled else now + QUICK

    def _time(self, worker: Worker, target: Target) -> None:
        """Sizes the next chunks of a scorer by the time that the calls of this one took: the way there and back takes
        longer while the trainer's other threads work."""
        size = self._quick.get(target, 1)
        if size == 0:
            return
        fits = int(worker.chunk * QUICK / worker.took) if worker.took else LARGEST_QUICK_CHUNK
        if fits >= worker.chunk:
            self._quick[target] = max(size, min(fits, 2 * worker.chunk, LARGEST_QUICK_CHUNK))
        else:
            self._quick[target] = max(1, fits)

    def _cut_off(self, worker: Worker) -> None:
        """Kills a worker with a job whose time is up; jobs that are not late go to another."""
        now, jobs = time.monotonic(), list(worker.jobs.values())
        self._remove(worker)
        self.waiting.extendleft(job for job in reversed(jobs) if job.deadline > now)
        for job in jobs:
            if job.deadline <= now:
                self._quick[job.target] = 0
                self._late(job)

    def _late(self, job: ScoringJob) -> None:
        if job.started:
            job.future.set_result(None)
        else:
            job.future.set_exception(JobFailed(ScoringFailure(f"was not imported within {LOADING:g} s")))

    def _ended(self, worker: Worker) -> None:
        first, *rest = worker.jobs.values()
        reason = f"ended its process, which {worker.how_it_ended()}"
        self._remove(worker)
        self.waiting.extendleft(reversed(rest))
        first.future.set_exception(JobFailed(ScoringFailure(reason)))

    def _remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.jobs = {}
        stop([worker])

    def _drop(self, error: BaseException | None) -> None:
        busy = [worker for worker in self.workers if worker.jobs]
        jobs = [*self._submitted, *self.waiting, *(job for worker in busy for job in worker.jobs.values())]
        self.workers[:] = [worker for worker in self.workers if worker not in busy]
        stop(busy)
        self.waiting.clear()
        self._submitted, self._dropping = [], False
        for job in jobs:
            if error is None:
                job.future.cancel()
            else:
                job.future.set_exception(error)


class Worker:
    """One process with its supervisor, and the jobs it has, by number."""

    def __init__(self, room: int, prints: Path | None) -> None:
        data, theirs = socket.socketpair()
        self.control, their_control = socket.socketpair()
        data.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SENDING, 0))
        there = prints and prints.parent.is_dir()  # else the run itself says that its folder is gone
        with theirs, their_control, open(prints, "ab") if prints and there else nullcontext() as output:
            descriptors = [theirs.fileno(), their_control.fileno()]
            command = [sys.executable, "-c", BOOT, *map(str, descriptors), str(room), json.dumps(sys.path)]
            self.supervisor = subprocess.Popen(
                command, pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True
            )
        self.channel = Channel(data)
        self.owner = os.getpid()
        self.jobs: dict[int, ScoringJob] = {}
        self.chunk, self.sent, self.took = 0, 0.0, inf
        """How many jobs it was sent last, when, and how many seconds their calls took."""
        self.slow_at, self.recalled = inf, False
        """When its present call is slow, and whether it was asked for the calls behind that."""

    def how_it_ended(self) -> str:
        """Returns how a worker ended by itself, as its supervisor reports it."""
        self.control.settimeout(2 * PATIENCE)
        with suppress(OSError, ValueError):
            code = int(self.control.recv(16))
            return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return "was killed"

    def let_go(self) -> None:
        """Closes both sockets: its supervisor then kills the worker."""
        self.channel.close()
        self.control.close()

    def wait(self) -> None:
        if os.getpid() != self.owner:  # a fork of the trainer ends, not the trainer
            return
        try:
            self.supervisor.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.wait()


def stop(workers: list[Worker]) -> None:
    """Lets go of all before it waits for the first: they end side by side."""
    leaving, workers[:] = list(workers), []
    for worker in leaving:
        worker.let_go()
    for worker in leaving:
        worker.wait()
