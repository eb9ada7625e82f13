"""How one key of the schema is written: its default, what it means, and which values it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from omegaconf import II

LIMITS = {"choices", "low", "high", "above", "off"}


def key(default: Any, meaning: str, *, path: bool = False, **limits: Any) -> Any:
    """Declares a dataclass field. Limits: choices, low <= value <= high, value > above; `off` is taken
    beside them. A list has those of its items. Paths have `~` and `$VARS` expanded."""
    assert limits.keys() <= LIMITS, limits
    metadata = {"meaning": meaning, "path": path, **limits}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type, **defaults: Any) -> Any:
    """Declares a nested group of keys. `defaults` replace the group's own defaults in this section only."""
    return dataclasses.field(default_factory=lambda: kind(**defaults))


def follows(other: str, meaning: str, **limits: Any) -> Any:
    """A key that takes the value of another key unless it is set."""
    return key(II(other), meaning, **limits)
