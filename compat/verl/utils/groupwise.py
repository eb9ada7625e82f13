"""Statistics of groups under verl's name; the numbers are `paddock.core.masked`'s."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paddock.core.masked import group_count, group_mean, group_std
from verl.utils.device import get_device_name


def as_torch_index(index: Any, device: torch.device | str | None = None) -> Tensor:
    """Returns group numbers 0, 1, ... of labels of any kind; numbers next to a whole one are that one."""
    if isinstance(index, Tensor):
        index = index.detach().cpu().numpy()
    labels = index.tolist() if isinstance(index, np.ndarray) else list(index)
    if labels and all(isinstance(label, int | float) for label in labels):
        numbers = np.asarray(labels, dtype=np.float64)
        if np.allclose(numbers, np.rint(numbers), rtol=0, atol=1e-6):
            labels = np.rint(numbers).astype(np.int64).tolist()
    known: dict[Any, int] = {}
    return torch.tensor([known.setdefault(label, len(known)) for label in labels], dtype=torch.long, device=device)


@torch.no_grad()
def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, deviation (n - 1, at least eps) and size of every group; a row alone has mean 0, deviation 1."""
    where = torch.device(device or (scores.device if scores.is_cuda else get_device_name()))
    values, groups = scores.detach().reshape(-1).float().to(where), gidx.reshape(-1).long().to(where)
    if not values.numel():
        return values, values.clone(), values.clone()
    first = torch.full((int(groups.max()) + 1,), -1, device=where)
    first[groups.flip(0)] = torch.arange(len(groups), device=where).flip(0)
    size, there = group_count(groups).float()[first], first >= 0
    alone = size < 2
    mean = torch.where(alone, torch.zeros_like(size), group_mean(values, groups)[first])
    spread = torch.where(alone, torch.ones_like(size), group_std(values, groups)[first].clamp(min=eps))
    return mean * there, torch.where(there, spread, torch.ones_like(spread)), size * there


__all__ = ["as_torch_index", "group_mean_std"]
