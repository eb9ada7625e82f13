"""The process that runs a program's code, and answers for its functions where there are checks."""

from __future__ import annotations

import atexit
import errno
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from . import kernel, serve
from .wire import MODULE

OUT_OF_MEMORY, OUT_OF_PROCESSES = 120, 121
"""Exit codes. A program may lie with them about the cause of its failure, and about nothing else."""
LINK = 3
FILE = "<program>"


def main(job: dict[str, Any], code: int, streams: tuple[int, ...], link: socket.socket | None) -> NoReturn:
    """Never returns: whatever happens, the process ends here, and with it only the program."""
    try:
        with open(code, encoding="utf-8") as file:
            source = file.read()
        descriptor = link.detach() if link else None
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        if descriptor not in (None, LINK):
            os.dup2(descriptor, LINK)
        os.closerange(LINK if descriptor is None else LINK + 1, 4096)
        _as_a_process_starts()
        if job["command"]:
            _execute(job["command"], source)
        kernel.limit(resource.RLIMIT_AS, job["memory_mb"] << 20)
        _end(_serve(source, socket.socket(fileno=LINK)) if link else _run(source))
    finally:
        os._exit(1)


def _as_a_process_starts() -> None:
    os.setsid()  # a signal to one's own process group does not stop at namespaces
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for number in (signal.SIGTERM, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HOME"] = os.getcwd()
    sys.argv = ["program.py"]
    depth, frame = 0, sys._getframe()
    while frame.f_back:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(sys.getrecursionlimit() + depth)


def _execute(command: list[str], source: str) -> NoReturn:
    file = os.path.join(os.getcwd(), "program")
    with open(file, "w", encoding="utf-8") as out:
        out.write(source)
    words = [word.replace("{file}", file) for word in command]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(words[0], words)


def _run(source: str) -> int:
    return _exit_code(lambda: _module(source, "__main__"))


def _module(source: str, name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, FILE, "exec", dont_inherit=True), module.__dict__)
    return module


def _exit_code(work: Callable[[], Any]) -> int:
    """Runs `work` and returns the exit code with which the interpreter itself would end."""
    try:
        work()
        return 0
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return (exit.code or 0) & 0xFF
        with suppress(Exception):
            print(exit.code, file=sys.stderr)
        return 1
    except MemoryError:
        return OUT_OF_MEMORY
    except BaseException as error:
        with suppress(BaseException):
            traceback.print_exception(error.with_traceback(_own_frames(error.__traceback__)))
        if isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN:
            return OUT_OF_PROCESSES
        return OUT_OF_PROCESSES if "can't start new thread" in str(error) else 1


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Returns the frames of the program, without ours above its first."""
    while frames and frames.tb_frame.f_code.co_filename != FILE:
        frames = frames.tb_next
    return frames


def _end(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _serve(source: str, link: socket.socket) -> int:
    """Loads the program, and answers for it until the checks are through."""
    module = ModuleType(MODULE)

    def load() -> None:
        nonlocal module
        module = _module(source, MODULE)

    return _exit_code(load) or serve.run(link, vars(module))
