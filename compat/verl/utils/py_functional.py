"""Small tools for dicts under verl's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.metric import Metric


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Adds each value to the list, or to the metric, of its name."""
    for name, value in new_data.items():
        key = f"{prefix}{name}"
        if key not in data:
            data[key] = value.init_list() if isinstance(value, Metric) else []
        data[key].append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the second to the first, in place; a key in both must hold the same."""
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise ValueError(f"both have {key!r}, and they differ")
        dict1[key] = value
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the dict with the prefix before each key that lacks it."""
    return {key if key.startswith(prefix) else f"{prefix}{key}": value for key, value in data.items()}


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [each[key] for each in list_of_dict] for key in (list_of_dict[0] if list_of_dict else ())}
