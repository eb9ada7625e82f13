"""What every kernel needs to be launched: is triton here, how wide is a block, how many programs fill the device."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from paddock.core.device import launches_early, multiprocessors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on a CPU, slowly, for tests."""
PROGRAMS = 8
"""Programs a multiprocessor that keep its memory busy."""


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def can_launch(tensor: Tensor) -> bool:
    return has_triton() and (tensor.is_cuda or INTERPRETED)


def power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(0, number - 1).bit_length()


def early(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that waits by itself (`gdc_wait`), and may so be launched before the one ahead has ended."""
    return {"launch_pdl": True} if launches_early(device) and not INTERPRETED else {}


def filling(device: torch.device) -> int:
    """Programs that fill the device when each walks over many rows."""
    return multiprocessors(device) * PROGRAMS
