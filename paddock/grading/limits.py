"""How large an answer may be, how long its comparison may take, and the exceptions that end a comparison early."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST = 1000  # characters; no final answer is longer, and parsers take time that grows faster than the text
DEEPEST = 40  # brackets, exponents and functions inside one another
MOST_MEMBERS = 100  # of a set or list: each is compared with each
MOST_BITS = 200_000  # of an exact number: 2^{100000} is computed, 10^{10^{10}} is not
SECONDS = 4.0  # CPU seconds for one answer; ordinary ones take 0.0001 to 0.02, an infinite sum in SymPy up to 2


class Unread(Exception):
    """The grammar of `reader.py` does not have this notation."""


class TooLarge(Exception):
    """An answer nests too deeply, or has a number too large to be computed."""


class TooLong(BaseException):
    """The CPU time of a comparison is spent. Not an Exception: SymPy catches those and goes on."""


@contextmanager
def cpu_seconds(limit: float) -> Iterator[None]:
    """Raises TooLong after `limit` CPU seconds of this process.

    CPU time, not wall time: how busy the machine is does not change a verdict. Signals reach the main thread only,
    which is where a worker scores; in any other thread there is no limit. One long call of native code is not
    interrupted: the pool's own limit kills the process then.
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
