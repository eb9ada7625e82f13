"""The warm interpreter of a cell: forks a guard for each program, which runs it in namespaces of its own.

Programs come one after the other, and none finds a trace of another: each has its own processes, files and memory.
What it runs is read after the fork, by the process that needs it, so that neither this one's memory nor that of later
programs ever holds it.

    zygote -> guard -> PID 1 of the program's namespace (pid1.py) -> program
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

from . import kernel, pid1, seccomp
from .launch import USER, WRITABLE
from .pid1 import ProgramIsolation
from .watch import World

OWN_NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
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
    # Some virtual machines open a socket when they start, only to see whether they can.
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.install_filter(seccomp.assembled(seccomp.DENIAL if facts.pop("command") else seccomp.KILL))
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    _preload()
    server = ForkServer(control, **facts)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    control.send(json.dumps({"ready": True, "nested": server.nested}).encode())
    gc.freeze()
    while server.serve_one():
        pass


def _preload() -> None:
    import site

    site.setquit()  # exit() and quit(), which come with `site`; its folders of packages are not for programs
    for name in PRELOADED:
        importlib.import_module(name)


class ForkServer:
    """Forks a guard for each program, and holds what guards are forked with."""

    def __init__(
        self,
        control: socket.socket,
        tmp_mb: int,
        unsafe: bool,
        shown_in_tmp: list[str],
        send_buffer: int,
        proc: int | None,
    ):
        """`proc` is a descriptor of the machine's /proc, if this cell could not be given one of its own."""
        self.control, self.tmp_mb, self.unsafe, self.shown_in_tmp = control, tmp_mb, unsafe, shown_in_tmp
        self.send_buffer, self.machines_proc = send_buffer, proc
        self.nested = not unsafe and self._works(lambda: None)
        self.proc = self.nested and self._works(pid1.mount_proc)  # tried once: the kernel logs every refusal

    def _works(self, step: Callable[[], None]) -> bool:
        """True if nested namespaces can be made here, and `step` works within them."""
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
        """Enters namespaces for one program, nested in the cell's: an empty /tmp, and for children own PIDs."""
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
        if self.nested:
            self._enter()
        world = self._world(descriptors[1:4])
        folder = tempfile.mkdtemp(prefix="paddock-unsafe-") if self.unsafe else "/tmp"
        start = time.monotonic()
        living, alive = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(living)
            self._pid1(job, descriptors, folder)
        code, *_, report, tests = descriptors
        for descriptor in (alive, code, report, tests):
            os.close(descriptor)
        ended_by = self._watch(job, world, living, start)
        seconds = time.monotonic() - start
        os.kill(child, signal.SIGKILL)  # in namespaces of its own, everything in them with it
        os.waitpid(child, 0)
        if self.unsafe:
            shutil.rmtree(folder, ignore_errors=True)
        return {"ended_by": ended_by, "seconds": seconds}

    def _pid1(self, job: dict[str, Any], descriptors: list[int], folder: str) -> NoReturn:
        try:
            pid1.main(job, descriptors, ProgramIsolation(folder, self.nested, self.proc))
        finally:
            os._exit(0)

    def _watch(self, job: dict[str, Any], world: World, living: int, start: float) -> str | None:
        """Returns None once PID 1 has ended by itself, else the limit that was passed."""
        poll = select.poll()
        poll.register(living, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        deadline = start + job["timeout"]
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(math.ceil(1000 * min(left, world.pause(job)))):
                return None  # or nobody waits for the answer any more
            if limit := world.passed(job, deadline):
                return limit
        return "timeout"

    def _world(self, streams: list[int]) -> World:
        if self.unsafe:
            return World(None, (), (), 0, crowded=False)
        crowded = self.machines_proc is not None
        proc = self.machines_proc if crowded else os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        return World(proc, WRITABLE, streams, self.send_buffer, crowded)
