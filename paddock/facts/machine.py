"""The machine at hand: devices, memory, installed engines. Found without torch, so that answers come at once."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

GIB = 1024**3


@dataclass(frozen=True)
class Speed:
    """What a device does at best: a GPU by its data sheet, a processor as measured (`processor.py`)."""

    flops: float  # products without sparsity, operations per second; of a GPU in bf16
    bandwidth: float  # of its memory, bytes per second

    def shared(self, ways: int) -> Speed:
        return Speed(self.flops / ways, self.bandwidth / ways)


_GPUS = {
    "a100-40": (40, 312, 1.555),
    "a100": (80, 312, 2.039),
    "a100-80": (80, 312, 2.039),
    "a800": (80, 312, 2.039),
    "h100": (80, 989, 3.35),
    "h100-nvl": (94, 835, 3.9),
    "h100-pcie": (80, 756, 2.0),
    "h800": (80, 989, 3.35),
    "h20": (96, 148, 4.0),
    "h200": (141, 989, 4.8),
    "gh200": (96, 989, 4.0),
    "b200": (180, 2250, 8.0),
    "l4": (24, 121, 0.3),
    "l40": (48, 181, 0.864),
    "l40s": (48, 362, 0.864),
    "a10": (24, 125, 0.6),
    "a6000": (48, 155, 0.768),
    "v100": (32, 125, 0.9),
    "4090": (24, 165, 1.008),
    "5090": (32, 210, 1.792),
    "3090": (24, 71, 0.936),
    "910b": (64, 376, 1.6),
    "910c": (128, 752, 3.2),
}
"""GiB of memory, TFLOP/s and TB/s of each; V100 has no bf16: its fp16."""
GPU_MEMORY_GIB = {name: memory for name, (memory, _, _) in _GPUS.items()}
GPU_SPEED = {name: Speed(tera * 1e12, wide * 1e12) for name, (_, tera, wide) in _GPUS.items()}


VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The environment variable that lists the accelerators which a process may use; unset: all of them."""


@dataclass(frozen=True)
class Machine:
    """Devices that this process can see."""

    device: str  # cuda | npu | cpu
    devices: int  # accelerators; 0 on a CPU machine
    device_memory: int | None  # bytes of one accelerator, where it can be read
    memory: int  # bytes of RAM
    cores: int
    installed: Container[str]  # packages that can be imported
    wandb_ready: bool = True  # someone is logged in, or it is told to stay offline

    def has(self, package: str) -> bool:
        return package in self.installed

    def holds_training(self, parameters: int, device: str) -> bool:
        """True if weights, gradients and AdamW's moments in fp32, 16 bytes a parameter, leave a third of memory."""
        memory = self.memory if device == "cpu" else self.device_memory or 16 * GIB
        return parameters * 16 < memory * 2 / 3

    def with_gpu(self, name: str) -> Machine:
        """Returns this machine with devices of a kind in the table: as many as it has, or one."""
        device = "npu" if name.startswith("910") else "cuda"
        count = self.devices if self.device == device and self.devices else 1
        return replace(self, device=device, devices=count, device_memory=GPU_MEMORY_GIB[name] * GIB)


def gpu_named(text: str) -> str | None:
    """Returns the name in the table that people also write as `RTX 4090`, `rtx4090` or `NVIDIA A100-80GB`."""
    plain = re.sub(r"nvidia|geforce|rtx|tesla|ascend|[^a-z0-9]|gb\b", "", text.lower())
    return next((name for name in GPU_MEMORY_GIB if name.replace("-", "") == plain), None)


OPTIONAL_PACKAGES = ("ray", "peft", "vllm", "sglang", "torch_npu", "vllm_ascend")
"""Packages whose versions the record of a run names if they are installed; loggers name theirs themselves."""


class Importable:
    """Contains the name of every package that this Python can import."""

    def __contains__(self, package: object) -> bool:
        imported = package in sys.modules
        return imported or (isinstance(package, str) and importlib.util.find_spec(package) is not None)


@cache
def this_machine() -> Machine:
    """Returns the machine of this process, which is looked at once."""
    device, count = _accelerators()
    return Machine(
        device=device,
        devices=count,
        device_memory=_cuda_memory() if device == "cuda" else None,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        installed=Importable(),
        wandb_ready=_wandb_ready(),
    )


def cache_folder(kind: str) -> Path:
    """Returns the user's cache folder for one kind of work. It may neither exist nor be writable."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "paddock" / kind


def _wandb_ready() -> bool:
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    told = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")
    return bool(told) or (netrc.is_file() and "wandb" in netrc.read_text(errors="ignore"))


def _accelerators() -> tuple[str, int]:
    for device, pattern in (("cuda", r"nvidia\d+"), ("npu", r"davinci\d+")):
        present = sum(bool(re.fullmatch(pattern, entry.name)) for entry in Path("/dev").iterdir())
        visible = os.environ.get(VISIBLE_DEVICES[device])
        if visible is not None:
            present = min(present, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))
        if present:
            return device, present
    return "cpu", 0


def _cuda_memory() -> int | None:
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        return min(int(line) for line in answer.split()) * 1024**2
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
