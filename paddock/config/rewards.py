"""The parts of a reward that `reward` and `custom_reward_function` name: rules and functions, each with a weight.

reward=math reward_weights=[1]                                       a rule by name, for every row
reward=[math,a.py:f] reward_weights=[1,0.2]                          a rule, and a function of a file
custom_reward_function.path=[a.py,b.py:fmt] .weights=[1,0.2]         functions of several files
custom_reward_function.path=a.py custom_reward_function.name=[f,g]   several functions of one file
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.facts.modules import MODULE

PATH, NAME, WEIGHTS = (f"custom_reward_function.{name}" for name in ("path", "name", "weights"))
ARGUMENTS = "custom_reward_function.reward_kwargs"
PYTHON = "python"
"""Path of a function that the program gave which made the run: `python:NAME`."""
TAKEN = frozenset({
    "score", "reward", "acc", "pred", "rule", "model", "rule_score", "model_score", "overlong", "overlong_reward",
    "timeouts", "cache_hits", "retries", "unscored", "math_undecided", "sandbox", "num_turns", "data_source",
    "ground_truth", "extra_info", "messages", "index", "location", "style", "images", "written_prompt", "conversation",
    "completion",
})  # fmt: skip
"""Columns and metrics that are no part's: a function of such a name is called FILE.FUNCTION instead."""


@dataclass(frozen=True)
class Part:
    """One rule or function; the reward is the sum of ``weight * value`` over all parts."""

    name: str
    """Name of its column in samples and dumps, and of its metric: ``reward/<name>/mean``."""
    weight: float
    path: str | None
    """File or ``pkg://module`` of a function, or `PYTHON`; None for a rule."""
    function: str
    """The function in that file, or the name of the rule."""
    kwargs: dict[str, Any]


def reward_parts(config: Config) -> list[Part]:
    """Returns rules first, then functions, as the config names them; empty if the row's data_source picks the rule."""
    rules = texts_of("reward", config.reward)
    functions = _functions(config)
    rule_weights = _weights("reward_weights", config.reward_weights, len(rules))
    weights = _weights(WEIGHTS, config.custom_reward_function.weights, len(functions))
    if repeated := [rule for rule, times in Counter(rules).items() if times > 1]:
        raise UserError(f"names {repeated[0]} twice", key="reward", value=config.reward, fix="name each rule once")
    names = _names(functions, rules)
    arguments = _arguments(config.custom_reward_function.reward_kwargs, names)
    return [
        *(Part(rule, weight, None, rule, {}) for rule, weight in zip(rules, rule_weights, strict=True)),
        *(
            Part(name, weight, path, function, own)
            for name, weight, (path, function), own in zip(names, weights, functions, arguments, strict=True)
        ),
    ]


def address_of(text: str) -> str | None:
    """Returns the address of a function, FILE.py:NAME or `pkg://MODULE:NAME`, None for the name of a rule."""
    path, name = address_parts(text)
    if name is None:
        return text if text.endswith(".py") else None
    dotted = all(part.isidentifier() for part in path.split("."))
    return f"{MODULE}{text}" if dotted and not path.endswith(".py") else text


def absent_files(config: Config) -> list[str]:
    """Returns the files of functions that are not there; a function of an installed module has none."""
    paths = [path for path, _ in _functions(config) if not path.startswith(MODULE) and path != PYTHON]
    return [path for path in paths if not os.path.isfile(path)]


def _functions(config: Config) -> list[tuple[str, str]]:
    """(file, function) of each: FILE:FUNCTION names its own, any other file those of custom_reward_function.name."""
    custom = config.custom_reward_function
    paths, names = [address_parts(path) for path in texts_of(PATH, custom.path)], texts_of(NAME, custom.name)
    open_paths = [path for path, name in paths if name is None]
    if not paths:
        return []
    if not open_paths and custom.name != type(custom)().name:
        fix = f"leave {NAME} out"
        raise UserError(f"every function is named in {PATH} already", key=NAME, value=custom.name, fix=fix)
    if len(names) == 1:
        return [(path, name or names[0]) for path, name in paths]
    if len(paths) == 1:
        return [(paths[0][0], name) for name in names]
    raise UserError(
        f"names {len(names)} functions for {len(paths)} files",
        key=NAME,
        value=custom.name,
        fix=f"write each with its file: {PATH}=[a.py:f,b.py:g]",
    )


def address_parts(text: str) -> tuple[str, str | None]:
    """`a.py:fmt` -> (a.py, fmt); a path without a function's name has None."""
    path, colon, name = text.rpartition(":")
    return (path, name) if colon and name.isidentifier() and path != MODULE.rstrip(":/") else (text, None)


def texts_of(key: str, value: Any) -> list[str]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if not isinstance(item, str) or not item:
            fix = f"a text, or a list of texts: {key}=[a,b]"
            raise UserError(f"{item!r:.60} is not a name", key=key, value=value, fix=fix)
    return list(items)


def _weights(key: str, weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        what = "rules of `reward`" if key == "reward_weights" else "functions"
        fix = f"{key}=[{','.join(['1'] * count)}]" if count else f"leave {key} out"
        raise UserError(f"there are {count} {what} and {len(weights)} weights", key=key, value=list(weights), fix=fix)
    for weight in weights:
        if not math.isfinite(weight):
            raise UserError(f"{weight} is not a weight", key=key, value=list(weights), fix="finite numbers")
    return [float(weight) for weight in weights]


def _names(functions: Sequence[tuple[str, str]], rules: Sequence[str]) -> list[str]:
    """A function's own name, with its file's where that would be ambiguous."""
    times = Counter([*rules, *(function for _, function in functions)])
    names = [
        f"{PurePath(path.removeprefix(MODULE)).stem}.{function}"
        if times[function] > 1 or function in TAKEN
        else function
        for path, function in functions
    ]
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(
            f"two functions are both called {repeated[0]}, and each is logged by its name",
            key=PATH,
            value=[f"{path}:{function}" for path, function in functions],
            fix="rename one of the functions or files, or name it once",
        )
    return names


def _arguments(given: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the arguments of each function. One function takes them as they are; of several each has its own
    mapping."""
    if len(names) < 2:
        return [dict(given) for _ in names]
    for name, own in given.items():
        if name not in names or not isinstance(own, dict):
            raise UserError(
                f"{name!r} is none of the functions {', '.join(names)}" if name not in names else "is not a mapping",
                key=f"{ARGUMENTS}.{name}",
                value=own,
                fix=f"of several functions each has its own: {ARGUMENTS}={{{names[0]}: {{argument: value}}}}",
            )
    return [dict(given.get(name, {})) for name in names]
