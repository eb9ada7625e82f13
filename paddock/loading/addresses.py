"""Addresses of functions among the names of rules: `reward=[FILE.py:function, exact_match]`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paddock.config.rewards import PATH, WEIGHTS, address_of, texts_of
from paddock.errors import UserError
from paddock.loading.overrides import Setting


def functions_apart(settings: list[Setting]) -> list[Setting]:
    """Returns the settings with addresses of functions in `reward`, and their weights, under the keys of functions."""
    last = {setting.key: setting for setting in settings}
    named = last.get("reward")
    items = texts_of("reward", named.value) if named and isinstance(named.value, str | list) else []
    functions = {index: address for index, item in enumerate(items) if (address := address_of(item))}
    if not named or not functions:
        return settings
    if (other := last.get(PATH)) and other.value:
        fix = f"name all functions in one of them: reward=[{','.join(items)},...]"
        raise UserError(f"names a function, and {PATH} names others", key="reward", value=named.value, fix=fix)
    parted: dict[str, Any] = {"reward": [item for index, item in enumerate(items) if index not in functions] or None,
                              PATH: list(functions.values())}  # fmt: skip
    weights = last["reward_weights"].value if "reward_weights" in last else None
    if isinstance(weights, list) and len(weights) == len(items):
        parted["reward_weights"] = [one for index, one in enumerate(weights) if index not in functions] or None
        parted[WEIGHTS] = [weights[index] for index in functions]
    kept = [setting for setting in settings if setting.key not in parted]
    return [*kept, *(replace(named, key=key, value=value) for key, value in parted.items())]
