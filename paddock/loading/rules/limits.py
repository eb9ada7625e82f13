"""Limits that the schema declares for single keys, and names that nothing is registered under."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from paddock.core.registry import suggest
from paddock.errors import UserError


def outside(value: Any, limits: Any) -> str | None:
    """Returns what is wrong with a value; None if it is within the limits."""
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a number"
    if isinstance(value, int) and abs(value) >= 2**63:
        return "must be a whole number of at most 64 bits"
    if "choices" in limits and value not in limits["choices"]:
        return "is not one of the values it takes"
    if "off" in limits and value == limits["off"]:
        return None
    beside = f", or {limits['off']}" if "off" in limits else ""
    for name, sign, broken in (
        ("low", ">=", lambda bound: value < bound),
        ("high", "<=", lambda bound: value > bound),
        ("above", ">", lambda bound: value <= bound),
    ):
        if name in limits and broken(limits[name]):
            return f"must be {sign} {limits[name]}{beside}"
    return None


def unknown(kind: str, key: str, name: str, known: Collection[str]) -> UserError:
    """Returns the error of a name that nothing is registered under; a plug-in's is known once it is imported."""
    own = "your own: register it in a module named by actor_rollout_ref.model.external_lib"
    return UserError(f"no such {kind}", key=key, value=name, fix=f"{suggest(name, [*known])}; {own}")
