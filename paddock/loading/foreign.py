"""Kinds of rules for keys of other launch surfaces: another name, another unit, no effect, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import Any

from paddock.config import tree
from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.facts.compat import CHECKOUT


@dataclass(frozen=True)
class Mapped:
    """Names the key of ours that means the same; a `*` at the end of both is the same rest of the key."""

    to: str
    value: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Converted:
    """Names the key of ours that means the same in another unit; its value depends on other settings of the run."""

    to: str
    value: Callable[[str, Any, Mapping[str, Any]], Any]
    """Takes the key, its value and every setting by name. Raises UserError if a setting that it needs is missing."""
    about: str


@dataclass(frozen=True)
class Several:
    """Turns one foreign key into keys of ours, none or several, by its value."""

    to: Callable[[str, Any, Mapping[str, Any]], dict[str, Any]]
    """Takes the key, its value and every setting by name; returns values by keys of the schema."""
    about: str


@dataclass(frozen=True)
class Ignored:
    """Says why a foreign key has no effect here, and needs none."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Says why a foreign key cannot be honoured, but for the values that ask for nothing."""

    why: str
    fix: str
    harmless: tuple[Any, ...] = (None,)


@dataclass(frozen=True)
class RefusedInTraining(Refused):
    """Says the same of a key without which a launch script is planned all the same."""


KeyRule = Mapped | Converted | Several | Ignored | Refused


def each(sections: Iterable[str], rules: Mapping[str, KeyRule]) -> dict[str, KeyRule]:
    """Returns the rules for the same names in several sections."""
    return {f"{section}.{name}": rule for section in sections for name, rule in rules.items()}


def moved(pairs: Mapping[str, str]) -> dict[str, KeyRule]:
    return {old: Mapped(new) for old, new in pairs.items()}


def share_of_lr(key: str, value: Any, given: Mapping[str, Any]) -> float:
    """Converts an absolute learning rate to a share of the section's peak rate."""
    return float(value) / peak_rate(key, value, given) if float(value) else 0.0


def times_lr(key: str, value: Any, given: Mapping[str, Any]) -> float:
    """Converts a share of the section's peak learning rate to an absolute rate."""
    return float(value) * peak_rate(key, value, given) if float(value) else 0.0


def peak_rate(key: str, value: Any, given: Mapping[str, Any]) -> float:
    section = key.rpartition(".")[0]
    if lr := number_of(given.get(f"{section}.lr")):
        return lr
    raise UserError("is converted by the peak rate, which is not set", key=key, value=value, fix=f"set {section}.lr")


def per_device(key: str, value: Any, given: Mapping[str, Any]) -> int:
    """Converts rows over all devices to rows of one device, at least one."""
    devices = number_of(given.get("trainer.n_gpus_per_node"))
    if not devices:
        reason = "counts rows over all GPUs, so its meaning changes with the machine"
        raise UserError(reason, key=key, value=value, fix="set the same key with _per_gpu")
    nodes = number_of(given.get("trainer.nnodes")) or 1
    return max(1, int(int(value) // (devices * nodes)))


def number_of(value: Any) -> float | None:
    """Returns a setting as a number; None if it is unset or refers to another key."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


@cache
def rules() -> Mapping[str, KeyRule]:
    """Returns the rules by key; a pattern with `*` is for several. The one foreign surface is verl's."""
    found: Mapping[str, KeyRule] = import_module("paddock.verl.keys").RULES
    return found


def rule_for(key: str) -> KeyRule | None:
    """Returns the exact entry, else the first pattern that matches and hides no key of the schema."""
    if key in rules() or key in tree.leaves():
        return rules().get(key)
    for pattern, rule in rules().items():
        if "*" in pattern and fnmatchcase(key, pattern):
            if isinstance(rule, Mapped):
                return replace(rule, to=rule.to.replace("*", key[len(pattern) - 1 :]))
            return rule
    return None


def is_section(key: str) -> bool:
    """True if rules here are for keys inside `key`."""
    return any(pattern.startswith(f"{key}.") for pattern in rules())


def _refers(value: Any) -> bool:
    """True for a reference to another key, as whole config files hold them: it asks for nothing by itself."""
    return isinstance(value, str) and value.startswith("${")


def translate(
    key: str, value: Any, given: Mapping[str, Any] | None = None, planned: bool = False
) -> tuple[list[tuple[str, Any]], str | None]:
    """Returns (key, value) as the schema has them, none where nothing is set; and a warning for the user.

    `given`: all settings by name, which a value in another unit needs. `planned`: a launch script is only planned.
    """
    match rule_for(key):
        case None:
            return [(key, value)], None
        case Mapped(to=to) if _refers(value) and to in value:
            return [], None  # one key of theirs takes the value of another, and both are one here
        case Mapped(to=to, value=convert):
            named = f"{key} is called {to} here"
            found, said = translate(to, convert(value), given, planned)  # the other name may have a rule of its own
            return found, f"{named}, and {said}" if said else named
        case Converted() | Several() if value is None or _refers(value):
            return [], None
        case Converted(to=to, value=convert, about=about):
            converted = convert(key, value, given or {})
            return [(to, converted)], f"{key}={value} is {to}={converted:g} ({about})"
        case Several(to=to, about=about):
            several = to(key, value, given or {})
            if key in several:
                return [(key, value)], None
            told = " ".join(f"{name}={setting}" for name, setting in several.items()) or "the default"
            return list(several.items()), f"{key}={value} is {told} ({about})"
        case Ignored(why=why):
            return [], f"{key}={value} is ignored: {why}"
        case Refused(why=why, harmless=harmless) if value in harmless or _refers(value):
            return [], f"{key}={value} is ignored: {why}"
        case RefusedInTraining(why=why, fix=fix) if planned:
            return [], f"training refuses it: {key}={value}: {why}; fix: {fix}"
        case Refused(why=why, fix=fix):
            raise UserError(why, key=key, value=value, fix=fix)


def differences(config: Config, origins: dict[str, str]) -> Iterable[str]:
    """Returns a warning for each default that differs in the checkout from which `paddock run` was called."""
    if not os.environ.get(CHECKOUT):
        return ()
    found: Iterable[str] = import_module("paddock.verl.forks").differences(config, origins)
    return found
