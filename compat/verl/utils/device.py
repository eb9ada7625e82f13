"""The device under verl's names."""

from __future__ import annotations

from typing import Any

import torch

from paddock.facts.machine import this_machine


def get_device_name() -> str:
    return this_machine().device


def get_device_id() -> int:
    module = get_torch_device()
    return int(module.current_device()) if hasattr(module, "current_device") else 0


def get_torch_device() -> Any:
    """Returns torch's module of the device: torch.cuda, torch.npu or torch.cpu."""
    return getattr(torch, get_device_name(), torch.cpu)


is_cuda_available = torch.cuda.is_available()
is_npu_available = get_device_name() == "npu"
