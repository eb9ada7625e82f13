"""The `reward` of a `Run`: rules by name and functions of the program, alone or several with weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from paddock.config.rewards import PATH, PYTHON, WEIGHTS, address_of
from paddock.errors import UserError
from paddock.facts.modules import MODULE
from paddock.library.plugins import SCORERS

TURNS = "actor_rollout_ref.rollout.multi_turn"
Reward = str | Callable[..., Any]
"""A rule by its name, a function or its address; see docs/en/library.md for the shapes of functions."""


def reward_settings(reward: Any) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Returns the keys that name these rewards, and the functions that are named `python:NAME` in them."""
    parts, weights = parts_of(reward), reward if isinstance(reward, Mapping) else {}
    for weight in weights.values():
        if not isinstance(weight, Real):
            raise UserError("is no weight", key="reward", value=f"{weight!r:.80}", fix="a number: {function: 0.5}")
    for part in parts:
        if not isinstance(part, str) and not callable(part):
            fix = "a function, the name of a rule, a list of these, or a dict with a weight for each"
            raise UserError("is no reward", key="reward", value=f"{part!r:.80}", fix=fix)
    rules = [part for part in parts if isinstance(part, str) and part not in SCORERS and not address_of(part)]
    functions = [part for part in parts if part not in rules]
    registered = [SCORERS.get(part, part) if isinstance(part, str) else part for part in functions]
    addresses, own = addresses_of(registered)
    settings: dict[str, Any] = {}
    if rules:
        settings["reward"] = rules
    if functions:
        settings[PATH] = addresses
    if rules and weights:
        settings["reward_weights"] = [float(weights[rule]) for rule in rules]
    if functions and weights:
        settings[WEIGHTS] = [float(weights[function]) for function in functions]
    return settings, own


def environment_settings(environment: Any, tools: Any) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Returns the keys that name an environment and tools, and what is named `python:NAME` in them."""
    named = parts_of(tools)
    several = dict(environment) if isinstance(environment, Mapping) else {None: environment}
    given = [part for part in (*several.values(), *named) if part is not None and not isinstance(part, str)]
    if wrong := next((part for part in given if not callable(part)), None):
        key = "environment" if any(wrong is part for part in several.values()) else "tools"
        fix = "a class, a function that returns an environment, or a name" if key == "environment" else "functions"
        raise UserError("cannot be called", key=key, value=f"{wrong!r:.80}", fix=fix)
    addresses, own = addresses_of(given)
    address = dict(zip(map(id, given), addresses, strict=True))
    settings: dict[str, Any] = {}
    if environment is not None:
        held = {name: address.get(id(part), part) for name, part in several.items()}
        settings["environment"] = held if isinstance(environment, Mapping) else held[None]
    if named:
        tools = [address.get(id(tool), tool) for tool in named]
        settings |= {f"{TURNS}.enable": True, f"{TURNS}.function_tool_path": tools}
    return settings, own


def parts_of(reward: Any) -> list[Any]:
    """Returns the rules and functions of a reward, one after the other."""
    several = isinstance(reward, Sequence | Mapping) and not isinstance(reward, str)
    return [] if reward is None else list(reward) if several else [reward]


def addresses_of(functions: Sequence[str | Callable[..., Any]]) -> tuple[list[str], dict[str, Callable[..., Any]]]:
    """Returns `pkg://module:name` of a function that other processes can import, `python:NAME` of any other one; an
    address is one already."""
    own: dict[str, Callable[..., Any]] = {}
    addresses = []
    for function in functions:
        if isinstance(function, str):
            addresses.append(address_of(function) or function)
            continue
        if bound := name_in_module(function):
            addresses.append(f"{MODULE}{function.__module__}:{bound}")
            continue
        name = name_of(function)
        if name in own:
            name = next(f"{name}_{number}" for number in range(2, len(functions) + 2) if f"{name}_{number}" not in own)
        own[name] = function
        addresses.append(f"{PYTHON}:{name}")
    return addresses, own


def name_in_module(function: Callable[..., Any]) -> str | None:
    """Returns the name by which another process finds the function at the top of its module: its own, or that of a
    closure which is bound to a name there. None for what no process can import."""
    there = sys.modules.get(str(getattr(function, "__module__", None)))
    if there is None or there.__name__ == "__main__" or getattr(there, "__spec__", None) is None:
        return None
    own = getattr(function, "__qualname__", "")
    return next((name for name in (own, *vars(there)) if vars(there).get(name) is function), None)


def name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None) or type(function).__name__
    return name if name.isidentifier() else "function"


def source_of(function: Callable[..., Any]) -> str:
    """Returns a text that changes when the function does, as far as that can be seen."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return repr(code.co_code + repr(code.co_consts).encode()) if code else type(function).__qualname__
