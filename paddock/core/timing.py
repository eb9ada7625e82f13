"""Where a step's seconds go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

PHASE = "phase"
"""Attribute of an error: the innermost phase that it has ended."""


class Timer:
    """``with timer("gen"): ...`` adds the seconds of the block to the phase; phases may repeat and nest."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running: set[str] = set()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if phase in self._running:  # the enclosing block counts these seconds already
            yield
            return
        self._running.add(phase)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            vars(error).setdefault(PHASE, phase)
            raise
        finally:
            self.seconds[phase] += time.perf_counter() - start
            self._running.remove(phase)

    def reset(self) -> None:
        self.seconds.clear()
