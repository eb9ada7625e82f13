"""The speed of this machine's processor: measured for a few milliseconds, in a process of its own with one thread.

A data sheet does not help here: cores of one name run at different clocks, and a virtual machine shares them. The
measurement takes half a second, most of which is the start of Python and the import of numpy. It counts processor time:
what else the machine does for those milliseconds says nothing about the hours that are planned.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from paddock.facts.machine import Speed

PATIENCE_S = 20
BANDWIDTH_THREADS = 4
"""Threads that fill the memory channels: more of them read no faster."""
BF16_RATES = {"amx_bf16": 8.0, "avx512_bf16": 1.5, "bf16": 1.5, "svebf16": 1.5}
"""Flags of processors that multiply in bf16, the fastest first: bf16 products per float32 product in the same time."""
PROBE = """
import time
import numpy as np

def best(times, work):
    def once():
        start = time.process_time()
        work()
        return time.process_time() - start
    return min(once() for _ in range(times))

square = np.ones((512, 512), np.float32)
source = np.ones(12_000_000, np.float32)
target = source.copy()
print(2 * 512**3 / best(8, lambda: square @ square), 2 * source.nbytes / best(3, lambda: np.copyto(target, source)))
"""


def processor_speed(threads: int, bf16: bool) -> Speed | None:
    """Products and copies per second of `threads` threads of this processor; None if it cannot be measured."""
    one = measured()
    if one is None:
        return None
    rate = bf16_rate() if bf16 else 1.0
    return Speed(one.flops * threads * rate, one.bandwidth * min(threads, BANDWIDTH_THREADS))


@cache
def measured() -> Speed | None:
    """Float32 products and copied bytes per second of one thread."""
    alone = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-I", "-c", PROBE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env={**os.environ, **alone}
        )
        flops, bandwidth = map(float, done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Speed(flops, bandwidth)


def bf16_rate() -> float:
    """Returns 1 for a processor that cannot: it computes in float32 whatever the config says (core/device.py)."""
    return next((rate for flag, rate in BF16_RATES.items() if flag in processor_flags()), 1.0)


def multiplies_bf16() -> bool:
    return not processor_flags().isdisjoint(BF16_RATES)


@cache
def processor_flags() -> frozenset[str]:
    """Instruction sets by Linux's names; empty if the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(named, "").split())
