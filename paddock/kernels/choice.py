"""Which kernels serve some tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paddock.kernels import native
from paddock.kernels.launch import can_launch


def kernels_for(*tensors: Tensor | None) -> Any:
    """The module of the kernels for these tensors, the first of which is there: triton's on a GPU, compiled ones on a
    CPU if all have one type that those know. None: torch's own operations do the work."""
    assert tensors[0] is not None
    if can_launch(tensors[0]):
        from paddock.kernels import gpu

        return gpu
    return native if native.can_run(*tensors) else None
