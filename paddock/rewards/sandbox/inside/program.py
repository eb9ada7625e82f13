"""The process that runs a program's code, and answers for its functions where there are checks."""

from __future__ import annotations

import atexit
import errno
import json
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

from . import kernel
from .checks import MODULE
from .wire import QuestionReader, written

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
    os.setsid()  # a signal to one's own process group does not stop at walls
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
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
    """As the interpreter itself would end."""
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
    """Without ours, above the program's first."""
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
    """Loads the program, tells the names of its functions, and answers until the checks are through."""
    own, kept = os.getpid(), list[Any]()
    reader, writer = link.makefile("rb"), link.makefile("wb")

    def send(kind: str, value: Any) -> None:
        if os.getpid() != own:  # a child that the program forked
            os._exit(0)
        writer.write(json.dumps([kind, written(value, kept)]).encode() + b"\n")
        writer.flush()

    module = ModuleType(MODULE)

    def load() -> None:
        nonlocal module
        module = _module(source, MODULE)

    if code := _exit_code(load):
        return code
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    send("names", list(functions))
    while True:
        try:
            kind, subject, *arguments = QuestionReader(reader, kept).load()
        except EOFError:
            return 0
        try:
            send("value", _answer(kind, subject, arguments, functions))
            continue
        except Exception as error:
            raised = type(error).__name__, str(error)[:500]
        send("raised", raised)  # out here the error is gone, and the memory that its frames held


def _answer(kind: str, subject: Any, arguments: list[Any], functions: dict[str, Any]) -> Any:
    if kind == "items":
        return list(subject)
    if kind == "length":
        return len(subject)
    function = _function(subject, functions) if isinstance(subject, str) else subject
    args, kwargs = arguments
    return function(*args, **kwargs)


def _function(name: str, functions: dict[str, Any]) -> Any:
    """A function of the program, or a method of its class `Solution` as some sites want it."""
    if name not in functions and "Solution" in functions:
        return getattr(functions["Solution"](), name)
    if name not in functions:
        raise NameError(f"name {name!r} is not defined")
    return functions[name]
