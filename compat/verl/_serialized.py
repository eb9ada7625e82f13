"""Tensors and TensorDicts as plain values and back, under the names that verl's protocol has for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.utils.tensordict_utils import tensordict_package

NESTED = "nested"


def serialize_single_tensor(obj: Tensor) -> tuple[str, tuple[int, ...], Any]:
    """Returns type, shape and bytes of a tensor."""
    raw = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), raw


def deserialize_single_tensor(arr: Any) -> Tensor:
    kind, shape, raw = arr
    return torch.from_numpy(np.array(raw, dtype=np.uint8)).view(getattr(torch, kind)).reshape(shape)


def serialize_tensordict(batch: Any) -> tuple[tuple[int, ...], str | None, dict[str, Any]]:
    """Returns batch size, device and tensors of a TensorDict; a nested tensor is one entry a row."""
    items = {
        name: (NESTED, str(value.layout), [serialize_single_tensor(row) for row in value.unbind()])
        if value.is_nested
        else serialize_single_tensor(value)
        for name, value in batch.items()
    }
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), items


def deserialize_tensordict(arr: Any) -> Any:
    size, device, items = arr
    tensors = {
        name: torch.nested.as_nested_tensor(
            [deserialize_single_tensor(row) for row in item[2]], layout=getattr(torch, item[1].removeprefix("torch."))
        )
        if item[0] == NESTED
        else deserialize_single_tensor(item)
        for name, item in items.items()
    }
    return tensordict_package().TensorDict(tensors, batch_size=size, device=device)
