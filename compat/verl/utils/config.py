"""Configs as objects under verl's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

TARGET = "_target_"


def omega_conf_to_dataclass(config: Any, dataclass_type: type | None = None) -> Any:
    """Returns a mapping as an object of its class: the one that is given, else the one that `_target_` names.

    An object stays what it is. Sections inside become objects if they have a `_target_` of their own.
    """
    if is_dataclass(config) and not isinstance(config, type):
        return config
    tree = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    if not isinstance(tree, Mapping):
        raise ValueError(f"a mapping is wanted, and {type(config).__name__} is none")
    if dataclass_type is None and TARGET not in tree:
        raise ValueError(f"the mapping has no {TARGET}, and no class is given")
    return made(tree, dataclass_type)


def made(tree: Mapping[str, Any], kind: type | None) -> Any:
    module, _, name = str(tree.get(TARGET, "")).rpartition(".")
    chosen = kind or getattr(import_module(module), name)
    inner = {key: made(value, None) if is_target(value) else value for key, value in tree.items() if key != TARGET}
    return chosen(**inner)


def is_target(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value.get(TARGET))
