"""A limit on the CPU time of one call: what ends a regular expression that backtracks without end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TooLong(BaseException):
    """The CPU time of a call is spent. Not an Exception: code that catches those would go on."""


@contextmanager
def cpu_seconds(limit: float) -> Iterator[None]:
    """Raises TooLong after `limit` CPU seconds of this process.

    CPU time, not wall time: how busy the machine is does not change a score. Python's `re` looks for signals while it
    searches. They reach the main thread only, where a worker scores; in any other thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = True

    def expire(*_: Any) -> None:
        if armed:
            raise TooLong

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, limit, 0.1)  # again and again: a bare `except:` may swallow the first
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
