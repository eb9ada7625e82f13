"""Coroutines of environments meet in one event loop, whoever asks for it first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from paddock.core import background as beside

THREADS = 16


def test_threads_that_ask_at_the_same_time_get_the_same_loop():
    for _ in range(20):
        beside._loop.cache_clear()
        together = threading.Barrier(THREADS)

        def ask(together: threading.Barrier = together) -> object:
            together.wait()
            return beside.loop_beside()

        with ThreadPoolExecutor(THREADS) as threads:
            found = list(threads.map(lambda _: ask(), range(THREADS)))
        assert len({*map(id, found)}) == 1
        loop = beside.loop_beside()
        loop.call_soon_threadsafe(loop.stop)
    beside._loop.cache_clear()
