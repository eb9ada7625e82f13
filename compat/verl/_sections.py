"""Classes of verl's names for sections of Paddock's config: the same keys and defaults, and keys that only verl has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from paddock.config.schema import Config
from verl.base_config import BaseConfig


@cache
def defaults() -> dict[str, Any]:
    """Returns Paddock's defaults as a tree; keys that follow others have the values of those."""
    node = OmegaConf.structured(Config)
    OmegaConf.resolve(node)
    return dict(OmegaConf.to_container(node))  # type: ignore[arg-type]


def section(
    name: str, path: str, mutable: Sequence[str] = (), bases: tuple[type, ...] = (BaseConfig,), **extra: Any
) -> Any:
    """Returns a class for a section of the config.

    `extra`: keys that only verl has, and others than Paddock's defaults; a class stands for a section inside.
    """
    node: Any = defaults()
    for part in path.split("."):
        node = node[part]
    return of_tree(name, {**node, **extra}, mutable, bases)


def of_tree(name: str, node: dict[str, Any], mutable: Sequence[str], bases: tuple[type, ...] = (BaseConfig,)) -> Any:
    columns = [(key, Any, field(default_factory=maker(key, value))) for key, value in node.items()]
    space = {"_mutable_fields": set(mutable), "__hash__": object.__hash__}
    return make_dataclass(name, columns, bases=bases, namespace=space, eq=False, kw_only=True)


def maker(key: str, value: Any) -> Callable[[], Any]:
    """Returns what makes the default of a field; a section inside is a class of its own."""
    if isinstance(value, type):
        return value
    if isinstance(value, dict) and value:
        return of_tree(key, value, ())  # type: ignore[no-any-return]
    return lambda: copy.deepcopy(value)
