"""Signals that end a run after its step, with a checkpoint: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Remembers the first signal within the block; Ctrl-C or SIGTERM once more ends the process at once.

    SIGHUP never does: a closing terminal sends it once by the kernel and once by the shell, and a service manager sends
    it right behind SIGTERM.
    """

    def __init__(self) -> None:
        self.received: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        return bool(self.received)

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # `nohup` asked to outlive the terminal
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number in self.received and number != signal.SIGHUP:
            raise KeyboardInterrupt
        first = not self.received
        self.received.add(number)
        if first:
            with suppress(OSError):  # a closed terminal refuses every word
                print(
                    "\npaddock: stopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr
                )
