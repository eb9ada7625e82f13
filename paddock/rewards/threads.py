"""Functions of the program that runs, which no other process can be given: scored in a thread of this one.

A function that holds what stays here: a lock, an open client, a model, environments. A thread cannot be killed: a call
that takes too long counts as cut off, and is left behind.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from typing import Any

from paddock.rewards.functions import RewardFunction, Target
from paddock.rewards.pool import JobFailed, ScoringJob, answers_of
from paddock.rewards.score import Failed
from paddock.rewards.worker import failure

LOOK = 0.05  # seconds between two looks at the clock of a call


class ThreadPool:
    """Runs jobs one after the other in one thread, with the methods of `Pool`."""

    late = "it runs in a thread, which cannot be killed: the call goes on beside the run"

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.waiting: deque[ScoringJob] = deque()
        self.functions: dict[Target, RewardFunction] = {}
        self.running: tuple[ScoringJob, float] | None = None
        """The job that the thread is at, and when it began."""
        self.thread: threading.Thread | None = None
        self.lock = threading.Condition()
        self.told = False

    def submit(self, jobs: Sequence[ScoringJob]) -> None:
        if not jobs:
            return
        with self.lock:
            self.waiting += jobs
            self.start()

    def start(self) -> None:
        """Starts a thread if none is at work."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.serve, name="rewards", daemon=True)
            self.thread.start()

    def serve(self) -> None:
        """Scores what waits. Ends when nothing does, or when another thread has taken its place."""
        own = threading.current_thread()
        while True:
            with self.lock:
                if self.thread is not own:
                    return
                if not self.waiting:
                    self.thread = self.running = None
                    return
                job = self.waiting.popleft()
                self.running = job, time.monotonic()
            try:
                found, error = self.score(job), None
            except Failed as failed:
                found, error = None, JobFailed(failure(failed))
            with self.lock:
                if self.thread is not own or job.future.done():
                    return
                self.running = None
            if error:
                job.future.set_exception(error)
            else:
                job.future.set_result(found)

    def score(self, job: ScoringJob) -> Any:
        if job.target not in self.functions:
            self.functions[job.target] = RewardFunction(job.target)
        return self.functions[job.target](job.requests)

    def results(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Returns the results of these jobs, in order; None for one that took too long."""
        try:
            while True:
                done, pending = wait_for(futures, LOOK, return_when=FIRST_EXCEPTION)
                if not pending or any(future.exception() for future in done):
                    break
                self.look_at_the_clock()
            return answers_of(futures)
        except BaseException:
            self.cancel()
            raise

    def look_at_the_clock(self) -> None:
        """Leaves a call behind that has taken longer than `timeout`."""
        with self.lock:
            if self.running is None or time.monotonic() - self.running[1] < self.timeout:
                return
            (job, _), self.running, self.thread = self.running, None, None
            if self.waiting:
                self.start()
        job.future.set_result(None)

    def cancel(self) -> None:
        """Drops all work; a call that runs is left behind."""
        with self.lock:
            dropped, self.running, self.thread = [*self.waiting], None, None
            self.waiting.clear()
        for job in dropped:
            job.future.cancel()

    def close(self) -> None:
        self.cancel()
        self.functions.clear()
