"""An event loop in a thread of its own, for environments whose packages are written with coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any

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
