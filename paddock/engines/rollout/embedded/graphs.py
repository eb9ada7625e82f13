"""Decode steps as CUDA graphs: one launch per step, and the host reads the done flags only after several."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paddock.core.device import Recording

log = logging.getLogger(__name__)

STEPS = 16
"""Steps between two reads of the done flags."""


def bucket(rows: int, most: int) -> int:
    """Returns the size of the graph that serves so many rows: powers of two, and one between each."""
    size = 8
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)


class Graphs:
    """What a step does, recorded once for each number of rows; a replay runs on the same memory, whatever it holds.

    The first step of a size runs as it is, and compiles what must be compiled. Where recording fails, all steps do.
    """

    def __init__(self, step: Callable[[int], None]):
        self.step = step
        self.recording = Recording()
        self.replays: dict[int, Callable[[], None]] = {}
        self.warm: set[int] = set()
        self.can_record = True

    def run(self, rows: int, times: int) -> None:
        if rows not in self.warm:
            self.step(rows)
            self.warm.add(rows)
            times -= 1
        if self.can_record and rows not in self.replays and times > 0:
            self.record(rows)
        for _ in range(times):
            if self.can_record:
                self.replays[rows]()
            else:
                self.step(rows)

    def record(self, rows: int) -> None:
        try:
            self.replays[rows] = self.recording.record(lambda: self.step(rows))
        except RuntimeError as error:
            self.can_record = False
            log.warning("decode steps are not recorded as graphs: %s", str(error).splitlines()[0])
