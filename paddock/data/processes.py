"""Work on the rows of large files, shared out over processes: parsing and chat templates hold Python's lock."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.progress import track

CHUNK = 512
MANY = 100_000
"""Rows from which starting processes, which takes seconds, is worth it."""
PROCESS = (
    "import pickle, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # the parent ends them
    "sys.path = pickle.load(sys.stdin.buffer); from paddock.data.processes import serve; serve()"
)
Found = TypeVar("Found")
_shared: list[Processes] = []


@contextmanager
def same_processes() -> Iterator[None]:
    """Calls of `over_ranges` in this block share their processes: each one takes seconds to start."""
    outermost = not _shared
    if outermost:
        _shared.append(Processes())
    try:
        yield
    finally:
        if outermost:
            _shared.pop().close()


def over_ranges(
    count: int, work: Callable[[range], list[Found]], what: str = "reading rows", threads: int = 1
) -> Iterator[Found]:
    """Yields what `work` returns for ranges that cover ``0..count-1``, in order.

    On all cores for many rows, if `work` can be sent to other processes; else in `threads` of this one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    packed = _packed(work) if count >= MANY and cores > 1 else None
    size = CHUNK if packed is None else 8 * CHUNK
    chunks = [range(start, min(start + size, count)) for start in range(0, count, size)]
    with ExitStack() as open_things:
        call, done = work, cast(Iterator[list[Found]], map(work, chunks))
        if packed is not None:
            open_things.enter_context(same_processes())
            call, threads = _shared[0].doing(packed, cores), cores
        if threads > 1:
            pool = open_things.enter_context(ThreadPoolExecutor(threads))
            open_things.callback(pool.shutdown, wait=False, cancel_futures=True)
            done = pool.map(call, chunks)
        console = Console(stderr=True)
        bar = track(done, what, total=len(chunks), console=console, transient=True) if console.is_terminal else done
        yield from (found for part in bar for found in part)


class Processes:
    """Python processes that each do one range of rows at a time. They are fresh ones: a fork would copy the threads
    of torch, Ray and tokenizers, and multiprocessing's own would run the user's script again."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []
        self.idle: SimpleQueue[Any] = SimpleQueue()

    def doing(self, packed: bytes, count: int) -> Callable[[range], list[Any]]:
        """Gives this work to `count` processes, which are started if they are not there."""
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}  # one process a core is enough
        while len(self.all) < count:
            process = subprocess.Popen(
                [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            self.all.append(process)
            self.idle.put(process)
            _send(process.stdin, sys.path)
        for process in self.all:
            _send(process.stdin, packed)
        return self._ask

    def _ask(self, rows: range) -> list[Any]:
        process = self.idle.get()
        try:
            _send(process.stdin, rows)
            found, error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError) as lost:
            raise RuntimeError("a process that reads rows has died: is there enough memory?") from lost
        finally:
            self.idle.put(process)
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        for process in self.all:
            process.kill()
            process.communicate()


def serve() -> None:
    """Answers ranges of rows, in a process of its own, until its input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a chat template or a tokenizer prints is no answer
    work: Any = None
    while True:
        try:
            asked = pickle.load(requests)
        except EOFError:
            return
        if isinstance(asked, bytes):
            work = pickle.loads(asked)
            continue
        try:
            _send(answers, (work(asked), None))
        except Exception as error:
            _send(answers, (None, error))


def _send(stream: Any, value: Any) -> None:
    pickle.dump(value, stream)
    stream.flush()


def _packed(work: Callable[[range], list[Found]]) -> bytes | None:
    try:
        return pickle.dumps(work)
    except Exception:  # a tokenizer or a data set of the user's may hold anything
        return None
