"""Processes that begin with torch imported: forked from the process of the tests."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch

from paddock.trainer import reinforcement, supervised  # noqa: F401  imported once, here, for all processes

FAILED = 99
"""Exit code of a command that raised."""


class Child:
    """A forked process, which ends with the exit code of a function."""

    def __init__(self, function: Callable[[], int | None]):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = FAILED
            try:
                torch.set_num_threads(torch.get_num_threads())  # the pool of a fork, before threads race for it
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


def write_to(file: int) -> None:
    """Has this process write its output and its errors to a file."""
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115


def forget(*packages: str) -> None:
    """Has this process import packages again, as a fresh one would."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            del sys.modules[name]


class ForkedCall(Child):
    """A function in a forked process, with the signals of a fresh one and the leader of its own group.

    A real start of Python and its imports take seconds, of which most tests learn nothing.
    """

    def __init__(self, function: Callable[[], int | None], output: Path | None = None, folder: Path | None = None):
        """`function`: returns the exit code; `output`: the file to which it writes; `folder`: where it works."""
        self.file = output.open("ab+") if output else TemporaryFile()  # noqa: SIM115  closed with the process of the tests

        def begun() -> int | None:
            os.setpgid(0, 0)
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL),
                                    (signal.SIGHUP, signal.SIG_DFL)):  # fmt: skip
                signal.signal(number, handler)
            write_to(self.file.fileno())
            if folder:
                os.chdir(folder)
            return function()

        super().__init__(begun)

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


class ForkedModule(Child):
    """`python -m module` as `subprocess.Popen` would run it in a session of its own, with its input in a pipe."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], env: dict[str, str], **_: Any):
        reading, writing = os.pipe()

        def begun() -> None:
            os.close(writing)
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(reading, 0)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            write_to(stdout.fileno())
            os.environ.update(env)
            sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
            runpy.run_module(command[-1], run_name="__main__", alter_sys=True)

        super().__init__(begun)
        os.close(reading)
        self.stdin = open(writing, "wb")  # noqa: SIM115  closed by who ends the process

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked module", timeout)
            time.sleep(0.01)
        return code
