"""Batches as TensorDicts under verl's name; the package tensordict is needed by those who call these functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paddock.errors import UserError


def tensordict_package() -> Any:
    try:
        import tensordict
    except ImportError as error:
        reason = "a batch becomes a TensorDict by the package tensordict, which is not installed"
        raise UserError(reason, key="tensordict", fix="pip install tensordict, or use DataProto as it is") from error
    return tensordict


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> Any:
    """Returns a TensorDict: tensors and lists have one entry a row, what is in `non_tensor_dict` one for all."""
    package = tensordict_package()
    rows = next((len(column) for column in tensor_dict.values()), 0)
    found = package.TensorDict({}, batch_size=[rows])
    for name, column in tensor_dict.items():
        objects = [package.NonTensorData(value) for value in column] if not isinstance(column, Tensor) else None
        found[name] = column if objects is None else package.NonTensorStack(*objects)
    for name, value in (non_tensor_dict or {}).items():
        found[name] = package.NonTensorData(value, batch_size=[rows])
    return found


def parts_of(tensordict: Any) -> tuple[dict[str, Tensor], dict[str, list[Any]], dict[str, Any]]:
    """Returns the tensors, the columns of objects and the settings of a TensorDict."""
    package = tensordict_package()
    tensors: dict[str, Tensor] = {}
    objects: dict[str, list[Any]] = {}
    settings: dict[str, Any] = {}
    for name in tensordict.keys():  # noqa: SIM118, a TensorDict iterates over its rows
        value = tensordict.get(name)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, package.NonTensorData):
            settings[name] = value.data
        else:
            objects[name] = [one.data if isinstance(one, package.NonTensorData) else one for one in value.tensordicts]
    return tensors, objects, settings
