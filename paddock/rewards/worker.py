"""The process that runs scorers: reads calls from a socket, answers each as soon as it has its score.

In: (target, seconds, [(number, requests), ...]); a call has one response, or all that a function of whole batches is
called with. A call without any asks for the function's shape (functions.py).
Out: (READY, first number, whether the function can be interrupted), then for each number (SCORED, number, scores),
(FAILED, number, failure) or (TIMED_OUT, number, None). Where calls run one after the other, (TOOK, number, seconds of
all) comes before the last of them. If the target cannot be loaded, FAILED for each.
RECALL, in the middle of calls, is answered when the present one is done, by (RETURNED, its number, [numbers of those
behind it]); these are not made. At any other time it is too late, and says nothing.
"""

from __future__ import annotations

import inspect
import io
import os
import socket
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paddock.rewards.channel import GONE, Channel
from paddock.rewards.functions import Target, function_of, load, shape_of
from paddock.rewards.score import Failed, ScoreRequest, checked

READY, SCORED, FAILED, TIMED_OUT, TOOK, RETURNED = "ready", "scored", "failed", "timed out", "took", "returned"
RECALL = "recall"


def work(data: int, room: int) -> None:
    """`room`: how many calls may run at a time."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # whole lines of several processes, also of one that is killed
    channel = Channel(socket.socket(fileno=data))
    if room == 1:
        serve(channel)
    else:
        serve_concurrently(channel, room)


def serve(channel: Channel) -> None:
    """Serves one call after the other, until the other end closes."""
    while True:
        try:
            if (message := channel.receive()) != RECALL:
                target, _, calls = message
                answer(channel, target, deque(calls))
        except GONE:
            return


def answer(channel: Channel, target: Target, left: deque[tuple[int, Any]]) -> None:
    first, requests = left[0]
    try:
        score: Any = load(target) if requests else lambda _: shape_of(function_of(target), target.batch)
    except Failed as error:
        for number, _ in left:
            channel.send((FAILED, number, error))
        return
    channel.send((READY, first, False))
    start = time.monotonic()
    while left:
        number, requests = left.popleft()
        try:
            result: tuple[str, int, Any] = (SCORED, number, score(requests))
        except Failed as error:
            result = (FAILED, number, error)
        if left and channel.has_something() and channel.receive() == RECALL:
            channel.send((RETURNED, number, [number for number, _ in left]))
            left.clear()
        if not left:
            channel.send((TOOK, number, time.monotonic() - start))
        channel.send(result)


def serve_concurrently(channel: Channel, room: int) -> None:
    """Calls side by side: coroutines in one event loop, plain functions in threads."""
    import asyncio  # a third of the time that a worker takes to start, for the few that need it

    async def run() -> None:
        loop, gone, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()
        loop.set_default_executor(ThreadPoolExecutor(room))

        def read() -> None:
            try:
                arrived = channel.arrived()
            except GONE:
                gone.set()
                return
            for target, seconds, ((number, (request,)),) in arrived:
                task = loop.create_task(answer_one(channel, target, seconds, number, request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        loop.add_reader(channel.socket, read)
        await gone.wait()
        os._exit(0)  # threads that still call would hold it up

    asyncio.run(run())


async def answer_one(channel: Channel, target: Target, seconds: float, number: int, request: ScoreRequest) -> None:
    """A coroutine that takes too long is cancelled here; a thread cannot be, and the pool kills the process."""
    import asyncio

    limit = asyncio.timeout(None)
    try:
        function = load(target)
        interruptible = inspect.iscoroutinefunction(function.function)
        channel.send((READY, number, interruptible))
        try:
            async with limit:
                if interruptible:
                    limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    result = await function.call_for(request)
                else:
                    result = await asyncio.to_thread(function.call_for, request)
                    result = await result if inspect.isawaitable(result) else result
            score = checked(result)
        except BaseException as error:
            function.fail(error)
        channel.send((SCORED, number, [score]))
    except Failed as error:
        channel.send((TIMED_OUT, number, None) if limit.expired() else (FAILED, number, error))
    except GONE:
        return
