"""Calls beside the decode: what a function or a coroutine returns or raises arrives, and cancelling reaches it."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import CancelledError, wait

import pytest

from paddock.core.background import Workers


@pytest.fixture
def workers():
    found = Workers()
    yield found
    found.close()


async def squared(number):
    await asyncio.sleep(0.001)
    return number * number


def test_coroutines_that_are_begun_together_return_each_its_own(workers):
    futures = [workers.start(squared, number) for number in range(500)]
    assert [future.result(10) for future in futures] == [number * number for number in range(500)]
    assert workers.start(squared, 7).result(10) == 49  # the loop is woken again


def test_what_a_coroutine_raises_arrives(workers):
    async def fails():
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        workers.start(fails).result(10)


@pytest.mark.parametrize("running", [True, False])
def test_cancelling_a_future_cancels_its_coroutine(workers, running):
    begun, ended = threading.Event(), threading.Event()

    async def waits():
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    future = workers.start(waits)
    if running:
        assert begun.wait(10)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(10)
    assert workers.start(squared, 2).result(10) == 4
    assert ended.wait(10) or not begun.is_set()


def test_close_cancels_coroutines_seen_by_the_loop_or_not():
    workers = Workers()
    begun = threading.Event()

    async def waits():
        begun.set()
        await asyncio.sleep(60)

    first = workers.start(waits)
    assert begun.wait(10)
    others = [workers.start(waits) for _ in range(10)]
    workers.close()
    done, left = wait([first, *others], 10)
    assert not left and all(future.cancelled() for future in done)


def test_a_wrapper_that_makes_a_function_of_a_coroutine_function_is_called_in_a_thread(workers):
    @functools.wraps(squared)
    def plain(number):
        return threading.current_thread().name, asyncio.run(squared(number))

    @functools.wraps(squared)
    def passed(number):
        return squared(number)

    name, found = workers.start(plain, 7).result(10)
    assert found == 49 and name == "environment"
    assert workers.start(passed, 7).result(10) == 49


def test_a_coroutine_that_exits_ends_neither_the_loop_nor_the_others(workers):
    async def exits():
        raise SystemExit(3)

    first, second = workers.start(exits), workers.start(squared, 7)
    with pytest.raises(SystemExit):
        first.result(10)
    assert second.result(10) == 49 and workers.start(squared, 8).result(10) == 64
