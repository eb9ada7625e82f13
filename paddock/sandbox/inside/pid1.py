"""PID 1 of a program's namespace: sets limits and the seccomp filter, starts the program, reports how it ended.

It does not run the program's code. If there are checks it runs them, and asks the program for its answers: see
checks.py. As PID 1 it cannot be killed from within its namespace, and its memory cannot be read.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from math import ceil
from typing import Any, NamedTuple

from . import checks, kernel, program, seccomp

FILES, SIGNALS = 256, 1024
LAST_FILTER = seccomp.assembled_last()
PATIENCE = 1.0  # seconds for a program to end once all is asked
GRACE = 0.2  # seconds for processes that a program started to follow it
FIRST_TO_GO = "1000"  # where memory runs out the kernel ends the program, and not who guards it
RDONLY_PROC = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC


class ProgramIsolation(NamedTuple):
    """How one program is isolated inside the cell."""

    folder: str
    """The program's working directory."""
    nested: bool
    """The program has namespaces of its own within those of the cell."""
    proc: bool
    """A /proc of the program's own PID namespace can be mounted."""


def main(job: dict[str, Any], descriptors: list[int], isolation: ProgramIsolation) -> None:
    code, stdin, stdout, stderr, report, tests = descriptors

    def tell(**facts: Any) -> None:
        os.write(report, json.dumps(facts).encode() + b"\n")

    try:
        _prepare(job, isolation)
        ours, theirs = socket.socketpair()
        child = os.fork()
    except OSError as error:
        tell(broken=str(error))
        return
    if child == 0:
        program.main(job, code, (stdin, stdout, stderr), theirs if job["checked"] else None)
    theirs.close()
    for descriptor in (code, stdin, stdout, stderr):
        os.close(descriptor)
    if job["checked"]:
        with open(tests, encoding="utf-8") as file:
            checks.run(ours, json.load(file), tell)
        with suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        status = _ended(child)
    else:
        _, status = os.waitpid(child, 0)
    tell(status=status, left_running=_left_running())


def _prepare(job: dict[str, Any], isolation: ProgramIsolation) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # as process 1 is anyway
    with suppress(OSError):
        kernel.write("/proc/self/oom_score_adj", FIRST_TO_GO)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if isolation.proc:
        mount_proc()
    elif isolation.nested:  # the cell's own would show its processes
        kernel.mount("tmpfs", "/proc", "tmpfs", RDONLY_PROC)
    os.chdir(isolation.folder)
    _lock(job, isolation)


def _ended(child: int) -> int:
    """Returns the status of a program that has answered all checks; kills it if it does not end within PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        signal.sigtimedwait({signal.SIGCHLD}, end - time.monotonic())
    if ended[0]:
        return ended[1]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0


def mount_proc() -> None:
    kernel.mount("proc", "/proc", "proc", RDONLY_PROC)


def _lock(job: dict[str, Any], isolation: ProgramIsolation) -> None:
    """Sets the limits of each process, drops capabilities and installs the filter. The guard holds the joint limits."""
    seconds = ceil(job["timeout"]) + 1
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: job["output_mb"] << 20,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: SIGNALS,  # also of timers, each of which reserves one
    }
    if isolation.nested and kernel.counts_processes_by_namespace():
        limits[resource.RLIMIT_NPROC] = job["processes"] + 2  # the guard and this one
    for kind, value in limits.items():
        kernel.limit(kind, value)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.install_filter(LAST_FILTER)


def _left_running() -> bool:
    """True if the program left processes behind, which PID 1 inherited; they get GRACE seconds to end."""
    end = time.monotonic() + GRACE
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        return True
    return False
