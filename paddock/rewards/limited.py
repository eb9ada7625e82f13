"""Calls to services that count them: several at a time, so many a minute, and again if one fails."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from paddock.rewards.pool import GRACE, JobFailed, ProcessPool, ScoringJob, Worker
from paddock.rewards.worker import FAILED, READY, SCORED, TIMED_OUT, ScoringFailure

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a call is tried again; each pause is twice the one before


class Rate:
    """Allows at most so many calls per minute, evenly spread: none is saved up for a burst."""

    def __init__(self, per_minute: float | None):
        self.interval = 60.0 / per_minute if per_minute else 0.0
        self.due = 0.0

    def take(self, now: float, count: float = 1.0) -> None:
        self.due = max(now, self.due) + count * self.interval


class LimitedPool(ProcessPool):
    """A pool whose workers hold several calls at a time, as many in all as the limits allow.

    A coroutine that takes too long is cancelled; a thread cannot be, so its process is killed, and the calls beside it
    are made again. A call that raised or was cut off is made up to `retries` times more, unless what it raised is a
    mistake in its code or what it returned is no score.
    """

    def __init__(
        self,
        processes: int,
        timeout: float,
        *,
        concurrent: int,
        per_minute: float | None,
        tokens_per_minute: float | None,
        tokens_per_call: float,
        retries: int,
        prints: Path | None = None,
    ):
        super().__init__(min(processes, concurrent), timeout, prints)
        self.concurrent, self.retries, self.tokens_per_call = concurrent, retries, tokens_per_call
        self.room = max(2, -(-concurrent // self.size))  # above 1: the worker serves calls side by side
        self.calls, self.tokens = Rate(per_minute), Rate(tokens_per_minute)
        self._full = False
        """No process takes the next job before a call ends."""

    def _next(self) -> float:
        """A deadline, or the moment at which a waiting job may be given."""
        deadlines = [job.deadline for worker in self.workers for job in worker.jobs.values()]
        may_start = inf
        if self.waiting and not self._full and self._in_flight() < self.concurrent:
            may_start = max(self.calls.due, self.tokens.due, min(job.not_before for job in self.waiting))
        return min([may_start, *deadlines])

    def _in_flight(self) -> int:
        return sum(len(worker.jobs) for worker in self.workers)

    def _give(self) -> None:
        self._idle()  # removes the dead
        self._full = False
        while self._in_flight() < self.concurrent:
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
            self.tokens.take(now, self.tokens_per_call)
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
            job, interruptible = worker.jobs[number], value
            job.started, job.deadline = True, time.monotonic() + self.timeout + (GRACE if interruptible else 0.0)
            return
        job = worker.jobs.pop(number)
        if kind == SCORED:
            job.future.set_result([replace(score, retries=job.retries) for score in value])
        elif kind == TIMED_OUT:
            self._again(job, None)
        elif kind == FAILED:
            self._again(job, value)

    def _again(self, job: ScoringJob, failure: ScoringFailure | None) -> None:
        """Retries the call after a pause, if tries are left; without `failure` it was cut off."""
        if job.retries < self.retries and not (failure and failure.lasting):
            job.not_before = time.monotonic() + min(LONGEST_PAUSE, FIRST_PAUSE * 2**job.retries)
            job.retries += 1
            self.waiting.append(job)
        elif failure is None:
            job.future.set_result(None)
        else:
            tries = f" (the last of {job.retries + 1} tries)" if job.retries else ""
            job.future.set_exception(JobFailed(failure._replace(reason=failure.reason + tries)))

    def _late(self, job: ScoringJob) -> None:
        """If a process with several calls hangs, the guilty call is unknown: each is repeated alone before it counts as
        late."""
        if job.started and job.shared:
            job.alone, job.shared = True, False
            self.waiting.append(job)
        elif job.started:
            self._again(job, None)
        else:
            super()._late(job)
