"""The device of this process: the only file that names vendors."""

from __future__ import annotations

import os
import random
import resource
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy
import torch

from paddock.errors import UserError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
CPU_BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16", "svebf16"})  # flags of processors that multiply in bf16


def device_type() -> str:
    """cuda, npu or cpu: what this process can use."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # there once torch_npu is imported
    return "npu" if npu is not None and npu.is_available() else "cpu"


def device_of(name: str | None = None) -> torch.device:
    """The device that `trainer.device` names, or the one that is there."""
    kind = name or device_type()
    if kind != "cpu" and kind != device_type():
        raise UserError(
            f"this process sees no {kind} device",
            key="trainer.device",
            value=kind,
            fix=f"trainer.device={device_type()}",
        )
    return torch.device(kind) if kind == "cpu" else torch.device(kind, vendor(kind).current_device())


def vendor(kind: str) -> ModuleType:
    """torch's module for an accelerator: streams, memory and seeds have the same names in each."""
    return torch.cuda if kind == "cuda" else getattr(torch, kind)


def collective_backend(kind: str) -> str:
    """torch.distributed's name for what carries tensors between processes; objects go over gloo."""
    carriers = {"cuda": "nccl", "npu": "hccl"}
    return f"cpu:gloo,{kind}:{carriers[kind]}" if kind in carriers else "gloo"


def synchronize(device: torch.device) -> None:
    """Waits until all that was launched has run."""
    if device.type != "cpu":
        vendor(device.type).synchronize(device)


def can_record(device: torch.device) -> bool:
    """Can launches be recorded as a graph, and replayed at once?"""
    return device.type == "cuda"


class Recording:
    """Graphs of launches that share memory for what is between their inputs and outputs."""

    def __init__(self) -> None:
        self.memory = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What replays the function's launches; it does not run now."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            function()
        return graph.replay


@cache
def multiprocessors(device: torch.device) -> int:
    return vendor(device.type).get_device_properties(device).multi_processor_count if device.type != "cpu" else 2


def empty_cache(device: torch.device) -> None:
    """Gives memory that torch holds but does not use back to the device."""
    if device.type != "cpu":
        vendor(device.type).empty_cache()


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on an accelerator since the last reset, that the process took on a CPU."""
    if device.type != "cpu":
        return vendor(device.type).max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """On a CPU this is possible on Linux alone; elsewhere the peak is that of the process's life."""
    if device.type != "cpu":
        vendor(device.type).reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def total_memory(device: torch.device) -> int:
    """Bytes that an accelerator has, used or not."""
    return vendor(device.type).get_device_properties(device).total_memory


def memory_in_use(device: torch.device) -> int:
    """Bytes that tensors take on an accelerator, that the process takes on a CPU."""
    if device.type != "cpu":
        return vendor(device.type).memory_allocated(device)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak_memory(device)


def seed_all(seed: int) -> None:
    """Every generator that a library may draw from. Paddock's own draws do not depend on them (see rng.py)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type that a config names; float32 where a CPU can only emulate it, at a fraction of the speed."""
    dtype = DTYPES[name]
    if device.type == "cpu" and dtype != torch.float32 and not cpu_multiplies_bf16():
        return torch.float32
    return dtype


def has_fused_optimizers(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")


@cache
def cpu_multiplies_bf16() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and not CPU_BF16.isdisjoint(info.read_text().split())
