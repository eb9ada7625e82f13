"""Limits that the schema declares for single keys, and names that nothing is registered under."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Any

from paddock.config import tree
from paddock.errors import UserError


def within_limits(leaf: tree.Leaf, value: Any) -> None:
    """The schema's own limits: choices, low <= value <= high, value > above."""
    if isinstance(value, list) and "choices" in leaf.metadata:
        for item in value:
            within_limits(leaf, item)
        return
    if value is None:
        return
    limits = leaf.metadata
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise UserError("is not a number", key=leaf.key, value=value, fix=f"{leaf.key}: {limits['meaning']}")
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in numbers):
        fix = f"{leaf.key}: {limits['meaning']}"
        raise UserError("must be a whole number of at most 64 bits", key=leaf.key, value=f"{value!s:.40}", fix=fix)
    if "choices" in limits and value not in limits["choices"]:
        nearest = difflib.get_close_matches(str(value), map(str, limits["choices"]), n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        known = ", ".join(map(str, limits["choices"]))
        raise UserError("is not one of the values it takes", key=leaf.key, value=value, fix=f"{hint}one of: {known}")
    for name, broken, sign in (
        ("low", lambda bound: value < bound, ">="),
        ("high", lambda bound: value > bound, "<="),
        ("above", lambda bound: value <= bound, ">"),
    ):
        if name in limits and broken(limits[name]):
            bound = limits[name]
            raise UserError(
                f"must be {sign} {bound}", key=leaf.key, value=value, fix=f"{leaf.key}: {limits['meaning']}"
            )


def unknown(kind: str, key: str, name: str, known: Collection[str]) -> UserError:
    """A name that nothing is registered under; a plug-in's name is known only once its module is imported."""
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    own = "your own: register it in a module named by actor_rollout_ref.model.external_lib"
    return UserError(f"no such {kind}", key=key, value=name, fix=f"{hint}known: {', '.join(known)}; {own}")
