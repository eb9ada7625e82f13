"""Processes that score, each killed with all it started, and replaced, when one response takes too long.

A worker is the child of a supervisor (core/supervisor.py) in a session of its own: a Ctrl-C in the terminal does not
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
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from paddock.config.schema import RewardModelConfig
from paddock.core.supervisor import PATIENCE
from paddock.rewards.channel import GONE, Channel
from paddock.rewards.functions import Shape, Target
from paddock.rewards.score import Failed, ScoreRequest
from paddock.rewards.worker import FAILED, READY, RECALL, RETURNED, SCORED, TIMED_OUT, TOOK

LOADING = 300.0  # seconds a scorer may take to be imported
SENDING = 5  # seconds in which a worker must take what it is sent
GRACE = 2.0  # seconds beyond the limit, in which a worker interrupts a coroutine by itself
BUSY = 0.1  # seconds for which all workers work before there are more of them
LARGEST_CHUNK = 32
CHUNKS_PER_WORKER = 4
QUICK = 0.01  # seconds for the calls of a chunk; as long as they take less, chunks grow, at most to twice the size;
# a call that takes longer by itself gives those behind it to idle workers
LARGEST_QUICK_CHUNK = 512
GATHERING = 0.0005  # seconds in which answers of a quick chunk gather before they are read
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a call is tried again; each pause is twice the one before
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[4])
from paddock.core.supervisor import main
main(*map(int, sys.argv[1:4]), "paddock.rewards.worker")"""


def results_of(futures: Sequence[Future[Any]]) -> list[Any]:
    """Returns the results of jobs that are done; raises what the first of them raised."""
    for future in futures:
        if future.done() and isinstance(error := future.exception(), Failed):
            raise error
    return [future.result() for future in futures]


@dataclass(eq=False)
class ScoringJob:
    """One call of a scorer. Its future gives a score for each request, None if the call was cut off, or Failed."""

    target: Target
    requests: tuple[ScoreRequest, ...]
    """One, or all that a function of whole batches is called with; without any the function's shape is asked for."""
    limit: float = inf
    """Seconds for this job, if the pool's time limit is not less."""
    future: Future[Any] = field(default_factory=Future)
    deadline: float = inf
    started: bool = False
    """True once the scorer is loaded and it is this job's turn."""
    retries: int = 0
    not_before: float = 0.0
    shared: bool = False
    """True if another job was in its process."""
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
        self.warned = False
        """True once a warning has named a call that took too long."""
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
        """Starts the jobs, and does not wait for them."""
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
            return results_of(futures)
        except BaseException:
            self.cancel()
            raise

    def shape_of(self, target: Target) -> Shape:
        """Returns how a function is called; raises Failed if no process can import it."""
        job = ScoringJob(target, ())
        self.submit([job])
        shape: Shape = job.future.result()
        return shape

    def cancel(self) -> None:
        """Drops all work, and kills the processes that are at it."""
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
            if not self.waiting and not self._jobs():
                self._thread = None
                return False
        for worker in [each for each in self.workers if not each.jobs and each.channel.has_something()]:
            self._remove(worker)  # it died since it last worked
        self._give()
        busy = [worker for worker in self.workers if worker.jobs]
        until = min([self._next(), *(job.deadline for job in self._jobs())])
        wait([self._wake_reader, *(worker.channel.socket for worker in busy)], max(0.0, until - time.monotonic()))
        if any(len(worker.jobs) > LARGEST_CHUNK for worker in busy):
            time.sleep(GATHERING)
        with suppress(BlockingIOError):
            self._wake_reader.recv(65536)
        for worker in busy:
            self._listen(worker)
        return True

    def _jobs(self) -> list[ScoringJob]:
        """Returns the jobs that workers hold."""
        return [job for worker in self.workers for job in worker.jobs.values()]

    def _next(self) -> float:
        """Returns when to look again, if nothing happens before and no deadline passes."""
        more = self._more_at if self.waiting and len(self.workers) < self.size else inf
        slow = min((worker.slow_at for worker in self.workers if len(worker.jobs) > 1), default=inf)
        return min(more, slow if self._has_room() else inf)

    def _give(self) -> None:
        """Gives work to all workers that are idle, and to new ones."""
        idle = [worker for worker in self.workers if not worker.jobs]
        hired = max(1, min(2 * len(self.workers), self.size)) if self._crowded(len(idle)) else len(self.workers)
        while self.waiting and (idle or len(self.workers) < hired):
            worker = idle.pop() if idle else self._hire()
            self._send(worker, self._chunk())
        if self._has_room():
            self._recall()

    def _has_room(self) -> bool:
        """True if nothing waits, and another worker could work."""
        return not self.waiting and (len(self.workers) < self.size or not all(worker.jobs for worker in self.workers))

    def _recall(self) -> None:
        """Asks workers whose present call takes long to return the calls behind it when that call is done."""
        now = time.monotonic()
        for worker in self.workers:
            if len(worker.jobs) > 1 and worker.slow_at <= now:
                worker.slow_at = inf
                with suppress(*GONE):  # it died: the answer that does not come tells
                    worker.channel.send(RECALL)

    def _crowded(self, idle: int) -> bool:
        """Returns True if all workers have had work for a while, and none is still loading its scorer. Workers between
        two calls of a slow scorer do not count as idle if more calls wait."""
        now = time.monotonic()
        loading = any(not next(iter(worker.jobs.values())).started for worker in self.workers if worker.jobs)
        slow = len(self.waiting) > idle and self._quick.get(self.waiting[0].target, 2) < 2
        if loading or (idle and not slow):
            self._more_at = now + BUSY
        return not self.workers or now >= self._more_at

    def _hire(self) -> Worker:
        self.workers.append(Worker(self.room, self.prints))
        return self.workers[-1]

    def _chunk(self) -> list[ScoringJob]:
        """Takes neighbouring jobs with one target, few enough that every worker gets several chunks; of a quick scorer
        more than that, up to an equal share of what waits for each worker that there is; half a share of few jobs, so
        that one that hangs has fewer behind it."""
        first = self.waiting.popleft()
        left = len(self.waiting) + 1
        shares = len(self.workers) * (1 if left > LARGEST_CHUNK else 2)
        fair = min(LARGEST_CHUNK, left // (self.size * CHUNKS_PER_WORKER))
        quick = min(self._quick.get(first.target, 0), -(-left // shares))
        size = max(fair, quick) if len(first.requests) == 1 else 1
        chunk = [first]
        while self.waiting and len(chunk) < size and self.waiting[0].target == first.target:
            chunk.append(self.waiting.popleft())
        return chunk

    def _send(self, worker: Worker, jobs: list[ScoringJob]) -> None:
        numbered = {next(self._numbers): job for job in jobs}
        for job in jobs:
            job.started, job.deadline = False, inf
        jobs[0].deadline = time.monotonic() + LOADING
        worker.jobs.update(numbered)
        worker.chunk, worker.sent, worker.took = len(jobs), time.monotonic(), inf
        worker.slow_at = inf
        calls = [(number, job.requests) for number, job in numbered.items()]
        try:
            worker.channel.send((jobs[0].target, self.timeout, calls))
        except BlockingIOError:
            jobs[0].started, jobs[0].deadline = True, 0.0  # it takes nothing: it hangs
        except GONE:
            pass  # it died: the answer that does not come tells

    def _listen(self, worker: Worker) -> None:
        """Reads what has arrived from a worker; then ends it if its time is up."""
        try:
            for kind, number, value in worker.channel.arrived():
                self._heard(worker, kind, number, value)
        except GONE:
            first, *rest = worker.jobs.values()
            first.future.set_exception(Failed(f"ended its process, which {worker.how_it_ended()}"))
            self._remove(worker)
            self.waiting.extendleft(reversed(rest))
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
                job.future.set_exception(value)
            if not worker.jobs and self._quick.get(job.target) != 0:
                # by the worker's clock: the way there and back takes longer while other threads of the trainer work
                fits = int(worker.chunk * QUICK / max(worker.took, 1e-6))
                size = max(self._quick.get(job.target, 1), 2 * worker.chunk)
                self._quick[job.target] = max(1, min(fits, size, LARGEST_QUICK_CHUNK))
        for job in itertools.islice(worker.jobs.values(), 1):  # the clock of a job starts when the one before is done
            now = time.monotonic()
            job.started, job.deadline = True, now + min(self.timeout, job.limit)
            worker.slow_at = now + QUICK

    def _cut_off(self, worker: Worker) -> None:
        """Kills a worker with a job whose time is up; jobs that are not late go to another."""
        now, jobs = time.monotonic(), list(worker.jobs.values())
        self._remove(worker)
        self.waiting.extendleft(job for job in reversed(jobs) if job.deadline > now)
        for job in jobs:
            if job.deadline <= now and job.started:
                self._quick[job.target] = 0
                self._late(job)
            elif job.deadline <= now:
                job.future.set_exception(Failed(f"was not imported within {LOADING:g} s"))

    def _late(self, job: ScoringJob) -> None:
        job.future.set_result(None)

    def _remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.jobs = {}
        stop([worker])

    def _drop(self, error: BaseException | None) -> None:
        busy = [worker for worker in self.workers if worker.jobs]
        jobs = [*self._submitted, *self.waiting, *self._jobs()]
        self.workers[:] = [worker for worker in self.workers if worker not in busy]
        stop(busy)
        self.waiting.clear()
        self._submitted, self._dropping = [], False
        for job in jobs:
            if error is None:
                job.future.cancel()
            else:
                job.future.set_exception(error)


class Rate:
    """Allows at most so many calls per minute, evenly spread: none is saved up for a burst."""

    def __init__(self, per_minute: float | None):
        self.interval = 60.0 / per_minute if per_minute else 0.0
        self.due = 0.0

    def take(self, now: float, count: float = 1.0) -> None:
        self.due = max(now, self.due) + count * self.interval


class LimitedPool(ProcessPool):
    """A pool for functions that ask a service: a worker holds several calls at a time, as many in all as the limits of
    the config allow.

    A coroutine that takes too long is cancelled; a thread cannot be, so its process is killed, and the calls beside it
    are made again. A call that raised or was cut off is made up to `max_retries` times more, unless what it raised is a
    mistake in its code or what it returned is no score.
    """

    def __init__(self, config: RewardModelConfig, prints: Path | None = None):
        super().__init__(min(config.num_workers or 1, config.max_concurrent), config.timeout, prints)
        self.config = config
        self.room = max(2, -(-config.max_concurrent // self.size))  # above 1: the worker serves calls side by side
        self.calls, self.tokens = Rate(config.max_rpm), Rate(config.max_tpm)
        self._full = False
        """True if no process takes the next job before a call ends."""

    def _next(self) -> float:
        if not self.waiting or self._full or len(self._jobs()) >= self.config.max_concurrent:
            return inf
        return max(self.calls.due, self.tokens.due, min(job.not_before for job in self.waiting))

    def _give(self) -> None:
        self._full = False
        while len(self._jobs()) < self.config.max_concurrent:
            now = time.monotonic()
            job = next((job for job in self.waiting if job.not_before <= now), None)
            if job is None or max(self.calls.due, self.tokens.due) > now:
                return
            worker = self._worker_for(job)
            if worker is None:
                self._full = True
                return
            self.waiting.remove(job)
            self.calls.take(now)
            self.tokens.take(now, self.config.estimated_tokens_per_request)
            job.shared = bool(worker.jobs)
            for other in worker.jobs.values():
                other.shared = True
            self._send(worker, [job])

    def _worker_for(self, job: ScoringJob) -> Worker | None:
        """Returns the least busy worker; None while a job that must be alone finds no process without jobs, or holds
        the only one."""
        if len(self.workers) < self.size and all(worker.jobs for worker in self.workers):
            return self._hire()
        able = [w for w in self.workers if not w.jobs or not (job.alone or any(x.alone for x in w.jobs.values()))]
        return min(able, key=lambda worker: len(worker.jobs), default=None)

    def _heard(self, worker: Worker, kind: str, number: int, value: Any) -> None:
        if kind == READY:
            job, grace = worker.jobs[number], GRACE if value else 0.0  # the worker itself can interrupt a coroutine
            job.started, job.deadline = True, time.monotonic() + self.timeout + grace
            return
        job = worker.jobs.pop(number)
        if kind == SCORED:
            job.future.set_result([replace(score, retries=job.retries) for score in value])
        elif kind == TIMED_OUT:
            self._again(job, None)
        elif kind == FAILED:
            self._again(job, value)

    def _again(self, job: ScoringJob, failure: Failed | None) -> None:
        """Retries the call after a pause, if tries are left; without `failure` it was cut off."""
        if job.retries < self.config.max_retries and not (failure and failure.lasting):
            job.not_before = time.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2**job.retries)
            job.retries += 1
            self.waiting.append(job)
        elif failure is None:
            job.future.set_result(None)
        else:
            tries = f" (the last of {job.retries + 1} tries)" if job.retries else ""
            job.future.set_exception(Failed(f"{failure}{tries}", fix=failure.fix))

    def _late(self, job: ScoringJob) -> None:
        """If a process with several calls hangs, the guilty call is unknown: each is repeated alone before it counts as
        late."""
        if job.shared:
            job.alone, job.shared = True, False
            self.waiting.append(job)
        else:
            self._again(job, None)


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
        self.slow_at = inf
        """When its present call is slow."""

    def how_it_ended(self) -> str:
        """Returns how a worker ended by itself, as its supervisor reports it."""
        self.control.settimeout(2 * PATIENCE)
        with suppress(OSError, ValueError):
            code = int(self.control.recv(16))
            return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return "was killed"

    def wait(self) -> None:
        if os.getpid() != self.owner:  # a fork of the trainer ends, not the trainer
            return
        try:
            self.supervisor.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.wait()


def stop(workers: list[Worker]) -> None:
    """Ends these workers side by side: tells all of them to end before it waits for the first."""
    leaving, workers[:] = list(workers), []
    for worker in leaving:
        worker.channel.close()
        worker.control.close()  # its supervisor then kills it
    for worker in leaving:
        worker.wait()
