"""Device time of a rollout's decode steps by kind of kernel, for `gpu_step.py --parts rollout --profile`.

Kernels are told apart by their names; those of products that stand between the last norm and the draw are the head's.
A kernel that starts before the one ahead of it has ended is counted from its start, so that the sum can be somewhat
above the time that passes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from paddock.core.device import synchronize
from paddock.engines.rollout.embedded import EmbeddedEngine

DECODE = "decode steps of a rollout"
DRAW = "draw_rows"
KINDS = {
    "products": r"multiply|thin_rows|widen_rows|narrow_rows|.*(gemm|gemv|nvjet|cutlass|splitk|cublas)",
    "attention": r"attend_|join_splits|order_rows|.*(flash|fmha)",
    "norms": r"norm_rows",
    "rotation": r"rotate",
    "gates": r"gate",
    "draw": rf"{DRAW}|number_rows",
}
"""How the names of kernels begin: Paddock's own as in paddock/kernels, others by a word of their library."""
SHOWN = ("products", "attention", "norms", "rotation", "gates", "head", "draw", "rest")
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
    shown = [f"{kind} {ms:.1f} ms ({ms / total:.0%})" for kind, ms in by_kind(kernels).items()]
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
    with marked(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        generate()
        torch.cuda.synchronize()
    return within(seen.events())


def within(events: Iterable[Any]) -> list[Kernel]:
    """Returns what ran on the device while decode steps were marked."""
    events = sorted(events, key=lambda event: event.time_range.start)
    marks = [event.time_range for event in events if event.name == DECODE and event.device_type == DeviceType.CPU]
    if not marks:
        raise SystemExit("--profile: no decode steps were seen; it knows those of rollout.name=embedded alone")
    found, waiting = [], iter(marks)
    mark = next(waiting)
    for event in events:
        if event.device_type == DeviceType.CPU or event.name == DECODE:
            continue
        while mark.end < event.time_range.start and (later := next(waiting, None)):
            mark = later
        if mark.start <= event.time_range.start <= mark.end:
            found.append((event.name, event.time_range.elapsed_us() / 1e3))
    return found
