"""Kinds of rules for keys of other launch surfaces: another name, another unit, no effect, or refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import Any, cast

from paddock.config import tree
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
    """Turns a foreign key into keys of ours, none or several, by its value."""

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


SECTIONS = {
    "OPTIM": "{@actor,critic}.optim",
    "FSDP": "{@actor,@ref,critic.model,reward_model.model}.fsdp_config",
    "MEGATRON": "{@actor,@ref,critic}.megatron",
    "ENGINE": "{@actor.fsdp_config,@ref.fsdp_config,critic.model.fsdp_config,MEGATRON,@actor,@ref}",
}


def keys_in(text: str) -> Iterator[str]:
    """Yields the keys that a text names: blanks part several, `{a,b}` stands for either, `@` for the actor's group, and
    a word of SECTIONS for those sections."""
    for word in text.split():
        section = word.partition(".")[0]
        if braces := re.search(r"\{(.*?)\}", word):
            for option in braces[1].split(","):
                yield from keys_in(word[: braces.start()] + option + word[braces.end() :])
        elif section in SECTIONS:
            yield from keys_in(SECTIONS[section] + word.removeprefix(section))
        else:
            yield word.replace("@", "actor_rollout_ref.")


def table(rules: Mapping[str, KeyRule]) -> dict[str, KeyRule]:
    """Returns the rules by key; those given are by texts of keys."""
    return {key: rule for text, rule in rules.items() for key in keys_in(text)}


def moved(pairs: Mapping[str, str], value: Callable[[Any], Any] = lambda value: value) -> dict[str, KeyRule]:
    """Returns rules for keys with other names; a text of several keys becomes a text of as many."""
    return {
        old: Mapped(new, value)
        for theirs, ours in pairs.items()
        for old, new in zip(keys_in(theirs), keys_in(ours), strict=True)
    }


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
    return cast(Mapping[str, KeyRule], import_module("paddock.verl.keys").RULES)


def rule_for(key: str, rules_by_key: Mapping[str, KeyRule] | None = None) -> KeyRule | None:
    """Returns the exact entry, else the first pattern that matches. Patterns of all keys hide none of the schema."""
    known = rules() if rules_by_key is None else rules_by_key
    if key in known or (rules_by_key is None and key in tree.leaves()):
        return known.get(key)
    for pattern, rule in known.items():
        if "*" in pattern and fnmatchcase(key, pattern):
            return replace(rule, to=rule.to.replace("*", key[len(pattern) - 1 :])) if isinstance(rule, Mapped) else rule
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
            return [], None  # a key of theirs takes the value of another, and both are the same here
        case Mapped(to=to, value=convert):
            named = f"{key} is called {to} here"
            pairs, note = translate(to, convert(value), given, planned)  # the other name may have a rule of its own
            return pairs, f"{named}, and {note}" if note else named
        case Converted() | Several() if value is None or _refers(value):
            return [], None
        case Converted(to=to, value=convert, about=about):
            converted = convert(key, value, given or {})
            return [(to, converted)], f"{key}={value} is {to}={converted:g} ({about})"
        case Several(to=to, about=about):
            several = to(key, value, given or {})
            if key in several:
                return [(key, value)], None
            settings = " ".join(f"{name}={setting}" for name, setting in several.items()) or "the default"
            return list(several.items()), f"{key}={value} is {settings} ({about})"
        case Ignored() | Refused() as rule:
            return [], without_effect(rule, key, value, planned)


def without_effect(rule: Ignored | Refused, key: str, value: Any, planned: bool = False) -> str:
    """Returns the warning of a key that nothing is done for; raises UserError if it cannot be left out."""
    if isinstance(rule, Ignored) or value in rule.harmless or _refers(value):
        return f"{key}={value} is ignored: {rule.why}"
    if isinstance(rule, RefusedInTraining) and planned:
        return f"training refuses it: {key}={value}: {rule.why}; fix: {rule.fix}"
    raise UserError(rule.why, key=key, value=value, fix=rule.fix)


def differences(value_of: Callable[[str], Any], origins: Mapping[str, str]) -> Iterable[str]:
    """Returns a warning for each default that differs in the checkout from which `paddock run` was called."""
    if not os.environ.get(CHECKOUT):
        return ()
    return cast(Iterable[str], import_module("paddock.verl.forks").differences(value_of, origins))
