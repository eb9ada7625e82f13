"""Decode steps as CUDA graphs: one launch per step, and the host reads the done flags only after several."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paddock.core.device import Recording
from paddock.engines.rollout.embedded.sequences import Extension

log = logging.getLogger(__name__)

STEPS = 16
"""Steps between two reads of the done flags."""
TURN_STEPS = 4
"""The same where responses are turns of conversations: what follows a turn waits for the host to see its end."""
MOST_BESIDE = 4096
"""New tokens beside a step up to which it is recorded: a graph keeps memory for them, and more fill a device anyway."""


def bucket(rows: int, most: int) -> int:
    """Returns the size of the graph that serves so many rows: powers of two, and one between each."""
    size = 8
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)


class Graphs:
    """What a step does, recorded once for each number of rows, and of new tokens beside them; a replay runs on the same
    memory, whatever it holds.

    The first step of a size runs as it is, and compiles what must be compiled. Where recording fails, all steps do.
    """

    def __init__(self, step: Callable[[int, Extension | None], None]):
        self.step = step
        self.recording = Recording()
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}
        self.warm: set[tuple[int, int]] = set()
        self.can_record = True

    def run(self, rows: int, times: int, beside: Extension | None = None) -> None:
        size = rows, beside.size if beside else 0
        if times > 0 and size not in self.warm:
            self.step(rows, beside)
            self.warm.add(size)
            times -= 1
        recorded = self.can_record and size[1] <= MOST_BESIDE
        if times > 0 and recorded and size not in self.replays:
            self.record(size, beside)
        for _ in range(times):
            if size in self.replays:
                self.replays[size]()
            else:
                self.step(rows, beside)

    def record(self, size: tuple[int, int], beside: Extension | None) -> None:
        try:
            self.replays[size] = self.recording.record(lambda: self.step(size[0], beside))
        except RuntimeError as error:
            self.can_record = False
            self.replays.clear()
            log.warning("decode steps are not recorded as graphs: %s", str(error).splitlines()[0])
