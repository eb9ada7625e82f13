"""The event loop under verl's name."""

from __future__ import annotations

import asyncio


def get_event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()
