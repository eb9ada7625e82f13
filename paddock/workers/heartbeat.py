"""Heartbeats: every rank writes what it is doing into a store of the driver's, so that a silent one can be named."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from torch.distributed import DistStoreError, Store

BEAT = 2.0
"""Seconds between two signs of life."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank said of itself, and when."""

    phase: str
    seconds: float
    """In that phase so far."""
    location: str
    """File, line and function of the code that its main thread runs."""
    host: str
    pid: int
    time: float

    def __str__(self) -> str:
        ago = max(0.0, time.time() - self.time)
        return (
            f"last sign of life {ago:.0f} s ago, from pid {self.pid} on {self.host}: "
            f"{self.seconds:.0f} s in {self.phase}, at {self.location}"
        )


class Heartbeat:
    """Writes a rank's signs from a thread of its own, for as long as the store is there."""

    def __init__(self, rank: int, store: Store):
        self.rank, self.store = rank, store
        self.phase, self.since = "waiting for work", time.time()
        self.worker = threading.get_ident()
        threading.Thread(target=self.run, name="heartbeat", daemon=True).start()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.phase
        self.phase, self.since = phase, time.time()
        try:
            yield
        finally:
            self.phase, self.since = before, time.time()

    def run(self) -> None:
        while True:
            now, place = time.time(), self.code_location()
            status = RankStatus(self.phase, now - self.since, place, socket.gethostname(), os.getpid(), now)
            try:
                self.store.set(key_of(self.rank), json.dumps(asdict(status)))
            except (DistStoreError, RuntimeError):  # the driver is gone
                return
            time.sleep(BEAT)

    def code_location(self) -> str:
        frame = sys._current_frames().get(self.worker)
        if frame is None:
            return "the end"
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


class Silence:
    """Notices ranks whose signs do not change, by the clock of this process."""

    def __init__(self, store: Store):
        self.store = store
        self.signs: dict[int, tuple[RankStatus | None, float]] = {}

    def of(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """Returns those that gave no new sign for so long."""
        now = time.monotonic()
        for rank in ranks:
            status = last_status(self.store, rank)
            if rank not in self.signs or self.signs[rank][0] != status:
                self.signs[rank] = status, now
        return [rank for rank in ranks if now - self.signs[rank][1] > seconds]


def last_status(store: Store, rank: int) -> RankStatus | None:
    key = key_of(rank)
    return RankStatus(**json.loads(store.get(key))) if store.check([key]) else None


def key_of(rank: int) -> str:
    return f"heartbeat/{rank}"
