"""Kinds of rules for keys of other launch surfaces: another name, another unit, no effect, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paddock.errors import UserError


@dataclass(frozen=True)
class Mapped:
    """The same thing under another name; a `*` at the end of both is the same rest of the key."""

    to: str
    value: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Converted:
    """The same thing in another unit: its value here follows from other settings of the run too."""

    to: str
    value: Callable[[str, Any, Mapping[str, Any]], Any]
    """Takes the key, its value and every setting by name. Raises UserError if a setting that it needs is missing."""
    about: str


@dataclass(frozen=True)
class Several:
    """One key of theirs is other keys here, none or several, by its value."""

    to: Callable[[str, Any, Mapping[str, Any]], dict[str, Any]]
    """Takes the key, its value and every setting by name; returns values by keys of the schema."""
    about: str


@dataclass(frozen=True)
class Ignored:
    """Has no effect here, and needs none."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Cannot be honoured, but for the values that ask for nothing."""

    why: str
    fix: str
    harmless: tuple[Any, ...] = (None,)


Rule = Mapped | Converted | Several | Ignored | Refused


def each(sections: Iterable[str], rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Returns the rules for the same names in several sections."""
    return {f"{section}.{name}": rule for section in sections for name, rule in rules.items()}


def moved(pairs: Mapping[str, str]) -> dict[str, Rule]:
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
