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
from functools import partial
from typing import Any

from paddock.rewards.functions import RewardFunction, Target
from paddock.rewards.runners import ScoringJob, results_of
from paddock.rewards.score import Failed

LOOK = 0.05  # seconds between two looks at the clock of a call


class ThreadPool:
    """Runs jobs one after the other in one thread, with the methods of `ProcessPool`."""

    late = "it runs in a thread, which cannot be killed: the call goes on beside the run"

    def __init__(self, timeout: float):
        self.timeout, self.warned = timeout, False
        self.functions: dict[Target, RewardFunction] = {}
        self.waiting: deque[ScoringJob] = deque()
        self.running: ScoringJob | None = None
        """The job that the thread is at."""
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def submit(self, jobs: Sequence[ScoringJob]) -> None:
        with self.lock:
            self.waiting += jobs
            self._start()

    def _start(self) -> None:
        """Starts a thread if there is work and none is at it."""
        if self.waiting and self.thread is None:
            self.thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
            self.thread.start()

    def _serve(self) -> None:
        """Scores what waits. Ends when nothing does, or when the thread was left behind."""
        while True:
            with self.lock:
                if self.thread is not threading.current_thread():
                    return
                if not self.waiting:
                    self.thread = None
                    return
                job = self.running = self.waiting.popleft()
                job.deadline = time.monotonic() + self.timeout
            try:
                if job.target not in self.functions:  # held by nobody else: it may hold what the program wants back
                    self.functions[job.target] = RewardFunction(job.target)
                end = partial(job.future.set_result, self.functions[job.target](job.requests))
            except Failed as error:
                end = partial(job.future.set_exception, error)
            with self.lock:
                if self.thread is not threading.current_thread():
                    return
                self.running = None
            end()

    def results(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Returns the results of these jobs, in order; None for one that took too long."""
        try:
            while True:
                done, pending = wait_for(futures, LOOK, return_when=FIRST_EXCEPTION)
                if not pending or any(future.exception() for future in done):
                    return results_of(futures)
                self._look_at_the_clock()
        except BaseException:
            self.cancel()
            raise

    def _look_at_the_clock(self) -> None:
        """Leaves a call behind that has taken longer than `timeout`."""
        with self.lock:
            job = self.running
            if job is None or time.monotonic() < job.deadline:
                return
            self.running = self.thread = None
            self._start()
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
