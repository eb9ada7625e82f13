"""A process that runs a worker as its child, and kills everything that is left when the worker ends.

The worker runs scorers, and a scorer may start programs, which may start daemons. On Linux the supervisor adopts
every orphan among them, so that all of them hang from it in the process tree, whatever session or group they chose;
elsewhere it reaches its process group alone. It kills all of them when the worker ends, and when the trainer closes
the control socket: on purpose, or because it died.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE = 5.0  # seconds for killed processes to go; one that waits for a disk cannot
PROC = Path("/proc")


def main(data: int, control: int, room: int, worker: str) -> None:
    """Starts a worker and supervises it. Only the child imports the module `worker`: the supervisor stays small."""
    for descriptor in (data, control):
        os.set_inheritable(descriptor, False)  # what a scorer starts does not hold them open
    supervise(socket.socket(fileno=control), data, lambda: import_module(worker).work(data, room))


def supervise(control: socket.socket, data: int, work: Callable[[], None]) -> None:
    """Runs `work` in a child, which alone holds `data`, writes its exit code to `control`, and ends with it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (woken, wake, control.detach()):
            os.close(descriptor)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        work()
        return
    os.close(data)
    status = None
    while status is None:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if control.fileno() in ready:
            break
        os.read(woken, 4096)
        status = reaped().get(child)
    kill_descendants()
    if status is not None:
        with suppress(OSError):
            control.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def kill_descendants() -> None:
    """Kills all descendants; stops them all first, since one that keeps forking could outrun the kills."""
    end = time.monotonic() + PATIENCE
    stopped: set[int] = set()
    while (living := descendants(os.getpid())) and time.monotonic() < end:
        fresh = living - stopped
        for pid in fresh or living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP if fresh else signal.SIGKILL)
        stopped |= fresh
        reaped()
        time.sleep(0.001)
    if not PROC.is_dir():
        os.killpg(0, signal.SIGKILL)


def descendants(root: int) -> set[int]:
    """Returns the pids of all living descendants of process `root`."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, ()) if child not in found]
        found.update(frontier)
    return found


def reaped() -> dict[int, int]:
    """Returns the exit statuses of the children that have ended, adopted ones too."""
    found: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def prctl(option: int, value: int) -> None:
    """Calls Linux's prctl; does nothing on systems without it."""
    import ctypes

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
