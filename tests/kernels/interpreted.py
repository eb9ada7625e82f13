"""Where kernels run: on a GPU as they are; elsewhere by triton's interpreter, in a process of its own.

The interpreter takes thousands of times as long: it tries a small case of each kernel, a GPU all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from paddock.kernels.launch import INTERPRETED

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""Triton's interpreter multiplies no bfloat16, and cuts one off instead of rounding."""

on_gpu = pytest.mark.skipif(INTERPRETED, reason="`make test-gpu` runs it; another test runs these kernels here")


def cases(*small: Any, on_gpu: Sequence[Any]) -> list[Any]:
    """Returns the values of a parameter: the small ones, and on a GPU the others too."""
    return [*small, *([] if INTERPRETED else on_gpu)]
