"""Calls that run beside the work: functions in threads, coroutines in an event loop that has a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import Any

log = logging.getLogger(__name__)

SECONDS = 10.0  # for environments to be closed at the end of a run
GATHER = 0.002  # seconds in which coroutines that are begun wait for others
MAIN_ONLY = "signal only works in main thread"
"""Begins what Python says if a thread sets a signal, as `signal.alarm` needs it."""
MOST_THREADS = 1024  # calls that wait at the same time: a conversation has one, and a thread costs some KiB


class Workers:
    """Runs calls and gives a Future for each. A thread cannot be killed: `close` leaves a call behind that still runs,
    in a thread that does not keep the process alive, and cancels coroutines."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.threads = self.busy = 0
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.begun: deque[tuple[Coroutine[Any, Any, Any], Future[Any]]] = deque()
        """Coroutines that the event loop has not seen yet."""
        self.woken = False
        self.closed = False
        self.ending: set[Future[Any]] = set()
        """Calls that free something."""
        self.main_only: set[str] = set()
        """Functions that turned out to need the main thread."""

    def start(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begins a call; a coroutine function runs in the event loop."""
        call = partial(function, *args, **kwargs)
        if inspect.iscoroutinefunction(function):
            return self.begin(call())
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            return self.begin(self.unwrapped(call))
        return self.in_thread(call)

    async def unwrapped(self, call: Callable[[], Any]) -> Any:
        """Calls what stands around a coroutine function in a thread: it may have made a plain function of it."""
        result = await asyncio.wrap_future(self.in_thread(call))
        return await result if inspect.isawaitable(result) else result

    def in_thread(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self.lock:
            self.busy += 1
            wanted = self.busy > self.threads and self.threads < MOST_THREADS
            self.threads += wanted
        self.jobs.put((call, future))
        if wanted:
            threading.Thread(target=self.serve, name="environment", daemon=True).start()
        return future

    def belongs_here(self, function: Callable[..., Any]) -> bool:
        """True if the function turned out to need the main thread, and this is it."""
        return bool(self.main_only) and name_of(function) in self.main_only and in_main_thread()

    def sent_back(self, name: str, error: BaseException | None) -> bool:
        """True if a function raised this because it needs the main thread, and this is it: it is then called here, now
        and from now on. TRL calls all functions in the main thread."""
        if not isinstance(error, ValueError) or not str(error).startswith(MAIN_ONLY):
            return False
        if name not in self.main_only:
            self.main_only.add(name)
            log.warning("%s raised ValueError: %s; %s", name, error, HERE if in_main_thread() else ELSEWHERE)
        return in_main_thread()

    def end(self, function: Callable[..., Any]) -> None:
        """Begins a call that frees something: nobody waits for it but `close`."""
        over: Future[None] = Future()  # done behind the warning of what the call raises: `close` waits for that, too
        self.ending.add(over)
        self.start(function).add_done_callback(partial(self.ended, over))

    def ended(self, over: Future[None], future: Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log.warning("an environment's close raised %s: %s", type(error).__name__, error)
        over.set_result(None)
        self.ending.discard(over)

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begins a coroutine in the event loop, which has a thread of its own: a notebook has a loop already."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.turn, args=(self.loop,), name="environments", daemon=True).start()
        future: Future[Any] = Future()
        self.begun.append((coroutine, future))
        if not self.woken:  # once for many: waking the loop's thread takes longer than all else that is done here
            self.woken = True
            self.loop.call_soon_threadsafe(self.loop.call_later, GATHER, self.take_begun, self.loop)
        return future

    def take_begun(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes tasks of the coroutines that were begun; runs in the event loop."""
        self.woken = False  # before the look: what is begun from now on wakes the loop again
        while self.begun:
            coroutine, future = self.begun.popleft()
            task = loop.create_task(exit_returned(coroutine))
            task.add_done_callback(partial(settle, future))
            future.add_done_callback(partial(cancel_task, loop, task))

    @staticmethod
    def turn(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            call, future = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            with self.lock:
                self.busy -= 1
            del job, call, future  # what a call holds is not kept until the next one

    def close(self, seconds: float = SECONDS) -> None:
        """Ends idle threads, cancels coroutines and calls that wait; those that run are left behind. What frees
        something has these seconds to be done."""
        if self.closed:
            return
        self.closed = True
        if late := wait(list(self.ending), seconds).not_done:
            log.warning("%d x close of an environment took longer than %g s, and was left behind", len(late), seconds)
        with contextlib.suppress(queue.Empty):
            while True:
                job = self.jobs.get_nowait()
                if job is not None:
                    job[1].cancel()
        for _ in range(self.threads):
            self.jobs.put(None)
        if self.loop is not None:
            loop = self.loop
            loop.call_soon_threadsafe(self.take_begun, loop)
            asyncio.run_coroutine_threadsafe(cancel_all(loop), loop)


HERE = """it is called in the main thread from now on, without a limit of time, and the engine waits meanwhile; \
@paddock.tool(inline=True) says so of a tool from the start"""
ELSEWHERE = "this run is not in the main thread, so every call of it fails"


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function; that of a method has the class of the object as its author wrote it."""
    owner = getattr(function, "__self__", None)
    kind = type(getattr(owner, "plain", owner)).__qualname__
    name = getattr(function, "__name__", type(function).__name__)
    return f"{kind}.{name}" if owner is not None else str(getattr(function, "__qualname__", name))


async def exit_returned(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, SystemExit | None]:
    """Returns what a coroutine returns, or the SystemExit that it raises: a task that raised it would end the event
    loop."""
    try:
        return await coroutine, None
    except SystemExit as error:
        return None, error


def settle(future: Future[Any], task: asyncio.Task[tuple[Any, SystemExit | None]]) -> None:
    """Hands what a task returned or raised to the future that others wait for."""
    if task.cancelled():
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    error = task.exception()
    result, left = (None, None) if error else task.result()
    if error or left:
        future.set_exception(error or left)
    else:
        future.set_result(result)


def cancel_task(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], future: Future[Any]) -> None:
    """Cancels the task of a future that was cancelled."""
    if future.cancelled() and not task.done():
        loop.call_soon_threadsafe(task.cancel)


async def cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    others = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop.call_soon(loop.stop)


# One loop for packages that are written with coroutines

FIRST = threading.Lock()
"""Held while the loop is looked for: episodes begin side by side, and there is one loop."""


def loop_beside() -> asyncio.AbstractEventLoop:
    """Returns the loop; it runs until the program ends."""
    with FIRST:
        return _loop()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine returns, which runs in that loop while this thread waits."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop_beside()).result()


# One loop for each thread that awaits results of functions

_own = threading.local()


def awaited_here(result: Awaitable[Any]) -> Any:
    """Awaits a result. One event loop serves the thread, so that a client which a function keeps stays usable."""

    async def wait() -> Any:
        return await result

    if not hasattr(_own, "loop"):
        _own.loop = asyncio.Runner()
    return _own.loop.run(wait())
