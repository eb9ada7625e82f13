"""Garbage collection while a device is to be kept busy."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_AT_START = gc.get_freeze_count()
"""Objects outside of garbage collection before anybody froze some: Python 3.12 begins with a few hundred."""
NEW_OBJECTS = 50_000
"""Objects that are made between two garbage collections. Few are in cycles: references free the others."""


frozen = threading.Event()
"""Set while objects are frozen: by a block that is under way, or by the program, which nobody undoes."""


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Garbage collection looks at objects that are made in the block alone: seldom, and once at its end.

    A look at all that was imported and loaded before takes some tenths of a second, and one at the answers of a
    thousand conversations ten milliseconds; a GPU runs dry meanwhile. Cycles of a step may hold much memory of a
    device, so they are collected at its end, where few objects are left to look at. A block inside of another leaves
    all to that one, without a count of what is frozen: that takes twenty milliseconds.
    """
    if not frozen.is_set() and gc.get_freeze_count() > FROZEN_AT_START:
        frozen.set()
    if frozen.is_set():
        yield
        return
    thresholds = gc.get_threshold()
    frozen.set()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.collect()
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        frozen.clear()
