"""Reward managers by name, under verl's name: a plain dict, which callers may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paddock.core.registry import suggest
from verl._errors import BadValue

Manager = TypeVar("Manager", bound=type)

REWARD_MANAGER_REGISTRY: dict[str, Any] = {}


def register(name: str) -> Callable[[Manager], Manager]:
    def file(manager: Manager) -> Manager:
        if REWARD_MANAGER_REGISTRY.get(name, manager) is not manager:
            raise ValueError(f"reward manager {name!r} is registered already, as {REWARD_MANAGER_REGISTRY[name]!r}")
        REWARD_MANAGER_REGISTRY[name] = manager
        return manager

    return file


def get_reward_manager_cls(name: str) -> Any:
    if name not in REWARD_MANAGER_REGISTRY:
        reason, fix = f"there is no reward manager named {name!r}", suggest(name, sorted(REWARD_MANAGER_REGISTRY))
        raise BadValue(reason, key="reward_model.reward_manager", value=name, fix=fix)
    return REWARD_MANAGER_REGISTRY[name]
