"""Device time by kind of kernel, for `gpu_step.py --profile`: of a rollout's decode steps, and of an update.

Kernels are told apart by their names; those of products that stand between the last norm and the draw are the head's.
A kernel that starts before the one ahead of it has ended is counted from its start, so that the sum can be somewhat
above the time that passes. A `Timeline` says how long the device was idle, and where.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from paddock.core.device import synchronize
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.workers.policy import Policy

DECODE, CALL = "decode steps of a rollout", "the whole call"
DRAW = "draw_rows"
KINDS = {
    "attention": r"attend_|join_splits|order_rows|copy_tiles|.*(flash|fmha)",
    "products": r"multiply|thin_rows|widen_rows|narrow_rows|.*(gemm|gemv|nvjet|cutlass|splitk|cublas)",
    "norms": r"norm_rows",
    "rotation": r"rotate",
    "gates": r"gate",
    "draw": rf"{DRAW}|number_rows",
    "log-probs": r"gather_rows|gradient_rows|normalise_rows",
    "optimizer": r".*(multi_tensor_apply|adam)",
}
"""How the names of kernels begin: Paddock's own as in paddock/kernels, others by a word of their library. The first
that fits counts: flash attention is built on cutlass."""
SHOWN = ("products", "attention", "norms", "rotation", "gates", "head", "draw", "log-probs", "optimizer", "rest")
SHORT = 10.0  # microseconds: gaps between kernels that are launched ahead
KERNELS = 0.01  # share of the whole from which a kernel of no known kind is named

Kernel = tuple[str, float]
"""Name and milliseconds."""


def kind_of(name: str) -> str:
    return next((kind for kind, begins in KINDS.items() if re.match(begins, name, re.IGNORECASE)), "rest")


def by_kind(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Returns the milliseconds of each kind of kernel; `kernels` are in the order in which they ran."""
    found, since_norm = dict.fromkeys(SHOWN, 0.0), 0.0
    for name, milliseconds in kernels:
        kind = kind_of(name)
        found[kind] += milliseconds
        if kind == "products":
            since_norm += milliseconds
        elif kind == "norms":
            since_norm = 0.0
        elif name.startswith(DRAW):
            found["head"] += since_norm
            found["products"] -= since_norm
            since_norm = 0.0
    return found


def listed(kernels: list[Kernel]) -> list[str]:
    """Returns each kind with its milliseconds and share; then kernels of no known kind that take long."""
    total, rest = sum(milliseconds for _, milliseconds in kernels), defaultdict[str, float](float)
    for name, milliseconds in kernels:
        if kind_of(name) == "rest":
            rest[name] += milliseconds
    shown = [f"{kind} {ms:.1f} ms ({ms / total:.0%})" for kind, ms in by_kind(kernels).items() if ms]
    unknown = [f"in the rest {ms:.1f} ms: {name[:80]}" for name, ms in rest.items() if ms > KERNELS * total]
    return [f"all {total:.1f} ms", *shown, *unknown]


@contextmanager
def marked() -> Iterator[None]:
    """Decode steps in the block have a mark of their own on the profiler's line of time, and nothing else runs then."""
    decode = EmbeddedEngine.decode

    def alone(self: EmbeddedEngine, *args: Any, **kwargs: Any) -> None:
        synchronize(self.model.device)
        with record_function(DECODE):
            decode(self, *args, **kwargs)
            synchronize(self.model.device)

    EmbeddedEngine.decode = alone  # type: ignore[method-assign]
    try:
        yield
    finally:
        EmbeddedEngine.decode = decode  # type: ignore[method-assign]


def decode_kernels(generate: Callable[[], object]) -> list[Kernel]:
    """Returns the kernels of all decode steps of a rollout on a CUDA device, in their order."""
    with marked():
        return within(profiled(generate))


def update_kernels(train: Callable[[], object]) -> list[Kernel]:
    """Returns the kernels of the last update of a run on a CUDA device, in their order."""
    learn, updates = Policy.learn, list[list[Any]]()

    def seen(self: Policy, *args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        updates.append(profiled(lambda: found.append(learn(self, *args, **kwargs))))
        return found[0]

    with patch.object(Policy, "learn", seen):
        train()
    return [timed(event) for event in on_device(updates[-1])]


def timed(event: Any) -> Kernel:
    return event.name, event.time_range.elapsed_us() / 1e3


def profiled(call: Callable[[], object]) -> list[Any]:
    """Returns the profiler's events of a call on a CUDA device, kernels among them, in the order of their starts."""
    device = torch.device("cuda")
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen, record_function(CALL):
        call()
        synchronize(device)
    return sorted(seen.events(), key=lambda event: event.time_range.start)


def on_device(events: Iterable[Any]) -> list[Any]:
    """Returns the events of kernels and copies, without those of the host and without marks."""
    return [event for event in events if event.device_type != DeviceType.CPU and event.name not in (DECODE, CALL)]


@dataclass(frozen=True)
class Timeline:
    """Holds the milliseconds of a call, by what the device does meanwhile."""

    before: float
    """Until its first kernel."""
    busy: float
    """At least one kernel runs."""
    short: float
    """Gaps of less than SHORT microseconds between kernels."""
    long: float
    """Longer ones: the device waits for the host."""
    after: float
    """From the end of its last kernel."""

    @classmethod
    def of(cls, events: list[Any]) -> Timeline:
        call = next(e.time_range for e in events if e.name == CALL and e.device_type == DeviceType.CPU)
        kernels = [event.time_range for event in on_device(events)]
        if not kernels:
            raise SystemExit("--profile: no kernel ran on the device")
        busy, gaps, end = 0.0, [], kernels[0].start
        for kernel in kernels:
            gaps.append(max(0.0, kernel.start - end))
            busy += max(0.0, kernel.end - max(kernel.start, end))
            end = max(end, kernel.end)
        short = sum(gap for gap in gaps if gap < SHORT)
        times = kernels[0].start - call.start, busy, short, sum(gaps) - short, max(0.0, call.end - end)
        return cls(*(microseconds / 1e3 for microseconds in times))

    def listed(self) -> list[str]:
        return [f"before the first kernel {self.before:.1f} ms", f"kernels {self.busy:.1f} ms",
                f"gaps under {SHORT:.0f} us {self.short:.1f} ms", f"longer gaps {self.long:.1f} ms",
                f"after the last kernel {self.after:.1f} ms"]  # fmt: skip


def within(events: list[Any]) -> list[Kernel]:
    """Returns what ran on the device while decode steps were marked; `events` are in the order of their starts."""
    marks = [event.time_range for event in events if event.name == DECODE and event.device_type == DeviceType.CPU]
    if not marks:
        raise SystemExit("--profile: no decode steps were seen; it knows those of rollout.name=embedded alone")
    found, waiting = [], iter(marks)
    mark = next(waiting)
    for event in on_device(events):
        while mark.end < event.time_range.start and (later := next(waiting, None)):
            mark = later
        if mark.start <= event.time_range.start <= mark.end:
            found.append(timed(event))
    return found
