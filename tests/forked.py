"""Processes that begin with torch imported: forked from the process of the tests."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from paddock.trainer import loop, rm, run, sft  # noqa: F401  imported once, here, for all processes

FAILED = 99
"""Exit code of a command that raised."""


class ForkedCall:
    """A function in a forked process, with the signals of a fresh one and the leader of its own group.

    A real start of Python and its imports take seconds, of which most tests learn nothing.
    """

    def __init__(self, function: Callable[[], int | None], output: Path | None = None, folder: Path | None = None):
        """`function`: returns the exit code; `output`: the file to which it writes; `folder`: where it works."""
        self.file = output.open("ab+") if output else TemporaryFile()  # noqa: SIM115  closed with the process of the tests
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, folder)

    def _run(self, function: Callable[[], int | None], folder: Path | None) -> None:
        code = FAILED
        try:
            os.setpgid(0, 0)
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
                                    (signal.SIGHUP, signal.SIG_DFL)):  # fmt: skip
                signal.signal(number, handler)
            for stream in (1, 2):
                os.dup2(self.file.fileno(), stream)
            sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
            if folder:
                os.chdir(folder)
            code = function() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float = 120.0, kill_at: float | None = None) -> int:
        """Returns the exit code, -9 of a killed process; kills one that still runs after `kill_at` seconds."""
        began = time.monotonic()
        while self.poll() is None:
            passed = time.monotonic() - began
            if (kill_at is not None and passed >= kill_at) or passed > timeout:
                self.send_signal(signal.SIGKILL)
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
                assert passed <= timeout, f"the run hung for {timeout} s:\n{self.said()}"
            else:
                time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def said(self) -> str:
        """Returns what it has written so far."""
        return os.pread(self.file.fileno(), 1 << 24, 0).decode()


class Forked(ForkedCall):
    """A `paddock` command in a forked process."""

    def __init__(
        self, arguments: Sequence[str], output: Path | None = None, folder: Path | None = None,
        before: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """`before`: what the process does first."""

        def command() -> int | None:
            from paddock.cli import main

            before()
            return main(list(arguments))

        super().__init__(command, output, folder)
