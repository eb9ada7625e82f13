"""The warm interpreter of a cell: forks a guard for each program, which puts it behind walls of its own.

Programs come one after the other, and none finds a trace of another: each has its own processes, files and memory.
What it runs is read after the fork, by the process that needs it, so that neither this one's memory nor that of later
programs ever holds it.

    zygote -> guard -> warden (process 1 of the program's world) -> program
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from . import kernel, warden
from .launch import USER, WRITABLE
from .warden import Walls

OWN_NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
LOOK = 0.02  # seconds between looks at a program's memory
PAGE = os.sysconf("SC_PAGE_SIZE")
LONGEST_MESSAGE, MOST_DESCRIPTORS = 1 << 16, 8
PRELOADED = (
    "array", "bisect", "cmath", "collections", "copy", "ctypes", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "heapq", "inspect", "io", "itertools", "json", "math", "operator", "pickle", "queue",
    "random", "re", "statistics", "string", "threading", "traceback", "types", "typing",
)  # fmt: skip
"""Modules that many programs import: here once, instead of in each."""


def main() -> None:
    """Arguments: the control socket, and what launch.py knows of the cell."""
    control, facts = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    control.set_inheritable(False)
    if not facts["unsafe"]:
        if os.geteuid() == 0:
            kernel.become_nobody()
        kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    _preload()
    cell = Cell(control, **facts)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    control.send(json.dumps({"ready": True, "nested": cell.nested}).encode())
    gc.freeze()
    while cell.serve_one():
        pass


def _preload() -> None:
    import site

    site.setquit()  # exit() and quit(), which come with `site`; its folders of packages are not for programs
    for name in PRELOADED:
        importlib.import_module(name)


class Cell:
    """What guards are forked with."""

    def __init__(self, control: socket.socket, tmp_mb: int, unsafe: bool, shown_in_tmp: list[str]):
        self.control, self.tmp_mb, self.unsafe, self.shown_in_tmp = control, tmp_mb, unsafe, shown_in_tmp
        self.nested = not unsafe and self._works(lambda: None)
        self.proc = self.nested and self._works(warden.mount_proc)  # tried once: the kernel logs every refusal

    def _works(self, step: Callable[[], None]) -> bool:
        """Whether walls can be built here, and this be done within them."""
        child = os.fork()
        if child == 0:
            try:
                self._enter()
                inner = os.fork()
                if inner == 0:
                    step()
                    os._exit(0)
                os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
            except OSError:
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0

    def _enter(self) -> None:
        """Walls of one program, inside those of the cell: an empty /tmp, and for children processes of their own."""
        kernel.unshare(OWN_NAMESPACES, user=USER)
        shown = {path: os.open(path, os.O_PATH) for path in self.shown_in_tmp}
        for folder in WRITABLE:
            kernel.mount_empty(folder, self.tmp_mb)
        for path, descriptor in shown.items():
            os.makedirs(path)
            kernel.mount(f"/proc/self/fd/{descriptor}", path, None, kernel.MS_BIND | kernel.MS_REC)

    def serve_one(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self.control, LONGEST_MESSAGE, MOST_DESCRIPTORS)
        if not message:
            return False
        told, tell = os.pipe()
        guard = os.fork()
        if guard == 0:
            try:
                answer = self._guard(json.loads(message), descriptors)
            except BaseException as error:
                answer = {"broken": f"{type(error).__name__}: {error}"}
            os.write(tell, json.dumps(answer).encode())
            os._exit(0)
        for descriptor in (tell, *descriptors):
            os.close(descriptor)
        while os.waitpid(-1, 0)[0] != guard:  # process 1 of the cell inherits orphans
            pass
        said = os.read(told, LONGEST_MESSAGE) or json.dumps({"lost": "the guard was killed"}).encode()
        os.close(told)
        with suppress(OSError):
            self.control.send(said)  # now that nothing of it is left
        return True

    def _guard(self, job: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Lets a program run, ends it where it goes beyond a limit, and says how it ended."""
        world = World("/proc" if not self.unsafe else None)
        if self.nested:
            self._enter()
        folder = tempfile.mkdtemp(prefix="paddock-unsafe-") if self.unsafe else "/tmp"
        start = time.monotonic()
        living, alive = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(living)
            self._warden(job, descriptors, folder)
        for descriptor in (alive, *descriptors):
            os.close(descriptor)
        ended_by = self._watch(job, world, living, start)
        seconds = time.monotonic() - start
        os.kill(child, signal.SIGKILL)  # in walls of its own, everything in them with it
        os.waitpid(child, 0)
        if self.unsafe:
            shutil.rmtree(folder, ignore_errors=True)
        return {"ended_by": ended_by, "seconds": seconds}

    def _warden(self, job: dict[str, Any], descriptors: list[int], folder: str) -> NoReturn:
        try:
            warden.main(job, descriptors, Walls(folder, self.nested, self.proc))
        finally:
            os._exit(0)

    def _watch(self, job: dict[str, Any], world: World, living: int, start: float) -> str | None:
        """None once the warden has ended by itself, else the limit that was passed."""
        poll = select.poll()
        poll.register(living, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        deadline = start + job["timeout"]
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(math.ceil(1000 * min(left, LOOK))):
                return None  # or nobody waits for the answer any more
            if limit := world.passed(job):
                return limit
        return "timeout"


class World:
    """The processes that came after it, as the cell's /proc shows them; without one it sees none."""

    def __init__(self, proc: str | None):
        self.proc = os.open(proc, os.O_RDONLY | os.O_DIRECTORY) if proc else None
        self.others = set(self._processes()) | {str(os.getpid())}

    def passed(self, job: dict[str, Any]) -> str | None:
        """The limit that all processes together are beyond."""
        own = [process for process in self._processes() if process not in self.others]
        if len(own) > job["processes"] + 1:  # the warden is one
            return "processes"
        most = job["memory_mb"] << 20
        if sum(self._resident(process) for process in own) <= most:
            return None
        # What they share counts for each of them so far; the exact share takes longer to find.
        return "memory" if sum(self._share(process) for process in own) > most else None

    def _processes(self) -> list[str]:
        if self.proc is None:
            return []
        return [name for name in os.listdir(self.proc) if name.isdigit()]

    def _resident(self, process: str) -> int:
        numbers = self._read(f"{process}/statm").split()
        return int(numbers[1]) * PAGE if numbers else 0

    def _share(self, process: str) -> int:
        lines = self._read(f"{process}/smaps_rollup").splitlines()
        share = next((line for line in lines if line.startswith("Pss:")), None)
        return int(share.split()[1]) * 1024 if share else self._resident(process)

    def _read(self, path: str) -> str:
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self.proc)
        except OSError:  # it has ended
            return ""
        try:
            return os.read(descriptor, 1 << 16).decode()
        except OSError:
            return ""
        finally:
            os.close(descriptor)
