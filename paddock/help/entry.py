"""One key as help shows it: type, default, limits and meaning in words, all taken from the schema."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from paddock.commands.keys_of import EVAL, GENERATE, RM, SFT, Command
from paddock.config import recipes, tree
from paddock.config.loggers import LOGGERS
from paddock.config.roles import POLICY_LOSSES
from paddock.config.rollout_correction import PRESETS

FOLLOWS = re.compile(r"\$\{([\w.]+)\}")
COMMANDS: dict[str, Command | None] = {
    "train": None, "plan": None, "sft": SFT, "rm train": RM, "generate": GENERATE, "eval": EVAL,
}  # fmt: skip
"""Commands that take keys; None: every key."""
OPEN_CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": tuple(recipes.ESTIMATORS),
    "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
    "algorithm.rollout_correction.preset": tuple(PRESETS),
    "trainer.logger": tuple(LOGGERS),
    "actor_rollout_ref.model.path": ("builtin:tiny",),
    "data.train_files": ("builtin:addition/train",),
    "data.val_files": ("builtin:addition/test",),
}
"""Names that completion offers for keys that take others too: a plug-in's, a list, a path."""


@dataclass(frozen=True)
class KeyEntry:
    """A key, described."""

    key: str
    type: str
    default: str
    limits: str
    meaning: str
    choices: tuple[str, ...]
    path: bool


@cache
def entries() -> dict[str, KeyEntry]:
    """Returns every key of the schema, in its order."""
    return {
        key: KeyEntry(
            key=key,
            type=type_of(leaf),
            default=text_of(tree.default_of(key)),
            limits=limits_of(leaf.metadata),
            meaning=leaf.metadata["meaning"],
            choices=choices_of(leaf),
            path=bool(leaf.metadata.get("path")),
        )
        for key, leaf in tree.leaves().items()
    }


def type_of(leaf: tree.Leaf) -> str:
    kinds = [kind for kind in typing.get_args(leaf.type) if kind is not types.NoneType]
    if typing.get_origin(leaf.type) in (list, dict) or not kinds:
        kinds = [leaf.type]
    names = [name_of(kind) for kind in kinds]
    if leaf.metadata.get("path"):
        names = [name.replace("text", "path").replace("anything", "path or list of paths") for name in names]
    return " or ".join(names)


def name_of(kind: Any) -> str:
    plain = {int: "whole number", float: "number", bool: "True or False", str: "text", Any: "anything"}
    if typing.get_origin(kind) is list:
        return f"list of {name_of(typing.get_args(kind)[0])}s"
    return "mapping" if typing.get_origin(kind) is dict else plain[kind]


def text_of(value: Any) -> str:
    """A default as it would be typed; `unset` if something else decides, `= key` if another key does."""
    if value is None:
        return "unset"
    if isinstance(value, str) and (other := FOLLOWS.fullmatch(value)):
        return f"= {other[1]}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(text_of, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {text_of(item)}" for name, item in value.items()) + "}"
    return str(value) if value != "" else "''"


def limits_of(metadata: Mapping[str, Any]) -> str:
    parts = []
    if "choices" in metadata:
        parts.append(f"one of {', '.join(metadata['choices'])}")
    for name, sign in (("low", ">="), ("above", ">"), ("high", "<=")):
        if name in metadata:
            parts.append(f"{sign} {metadata[name]}")
    return ", ".join(parts) + (f", or {metadata['off']}" if "off" in metadata else "")


def choices_of(leaf: tree.Leaf) -> tuple[str, ...]:
    if leaf.metadata.get("choices"):
        return tuple(leaf.metadata["choices"])
    of_type = (leaf.type, *typing.get_args(leaf.type))
    return ("True", "False") if bool in of_type else OPEN_CHOICES.get(leaf.key, ())


def commands_reading(key: str) -> list[str]:
    return [name for name, command in COMMANDS.items() if command is None or takes(command, key)]


def takes(command: Command, key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in command.reads)


def default_in(command: Command | None, entry: KeyEntry) -> str:
    """A command may have another default than the schema; that of a run with a model or data of its own is shown."""
    if command is not None:
        for source in (command.defaults, command.real):
            if entry.key in source:
                return text_of(source[entry.key])
    return entry.default


def set_elsewhere(key: str) -> list[str]:
    """Lists what sets this key unlike the schema: recipes, the embedded default, a command, a kind of device."""
    by_value: dict[str, list[str]] = {}
    for estimator, recipe in recipes.ESTIMATORS.items():
        if key in recipe.values:
            by_value.setdefault(text_of(recipe.values[key]), []).append(estimator)
    by_value.pop(entries()[key].default, None)
    notes = [f"{value} with algorithm.adv_estimator={' or '.join(names)}" for value, names in by_value.items()]
    if key in recipes.EMBEDDED:
        notes.append(
            f"{text_of(recipes.EMBEDDED[key])} in the embedded default (no model and no data but built-in ones)"
        )
    if key in recipes.GUIDE:
        notes.append(f"{recipes.GUIDE[key]} if it is unset, and a model or data of your own is named")
    if key in recipes.ON_NPU:
        notes.append(f"{text_of(recipes.ON_NPU[key])} with trainer.device=npu")
    for name, command in COMMANDS.items():
        for values in (command.defaults, command.real) if command and takes(command, key) else ():
            if key in values:
                notes.append(f"{text_of(values[key])} in `paddock {name}`")
    return notes


def followers(key: str) -> list[str]:
    """Keys that take the value of this one unless they are set."""
    return [other.key for other in entries().values() if other.default == f"= {key}"]


def short_name(command: Command | None, key: str) -> str:
    """The shortest name under which a command takes this key."""
    names = [key]
    for short, full in (command.names if command else {}).items():
        if full == key:
            names.append(short)
        elif full.endswith(".") and key.startswith(full):
            names.append(short + key.removeprefix(full))
    return min(names, key=len)
