"""The schema as a tree of dotted keys: which exist, what they take, and which one a misspelt key meant."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from paddock.config.schema import Config
from paddock.config.secrets import masked


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One key that takes a value."""

    key: str
    type: Any
    metadata: Mapping[str, Any]
    optional: bool
    open: bool  # a mapping in which further keys may be added


@cache
def leaves() -> dict[str, Leaf]:
    return {leaf.key: leaf for leaf in _walk(Config, "")}


def _walk(kind: type, prefix: str) -> Iterator[Leaf]:
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key, annotation = f"{prefix}{field.name}", types[field.name]
        if dataclasses.is_dataclass(annotation):
            yield from _walk(typing.cast(type, annotation), f"{key}.")
        else:
            optional = annotation is Any or type(None) in typing.get_args(annotation)
            yield Leaf(key, annotation, field.metadata, optional, typing.get_origin(annotation) is dict)


@cache
def defaults() -> Config:
    """Returns the schema's defaults, which nobody may change."""
    return Config()


def default_of(key: str) -> Any:
    return get(defaults(), key)


@cache
def sections() -> frozenset[str]:
    """Keys that hold other keys."""
    parents = (key.split(".")[:depth] for key in leaves() for depth in range(1, key.count(".") + 1))
    return frozenset(".".join(parts) for parts in parents)


def leaf_of(key: str) -> Leaf | None:
    """Returns the leaf at this key, or the open mapping that the key lies in."""
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        leaf = leaves().get(".".join(parts[:depth]))
        if leaf is not None and (depth == len(parts) or leaf.open):
            return leaf
    return None


def meant(key: str, others: frozenset[str] = frozenset()) -> list[str]:
    """Keys that a misspelt one may have stood for: ending as it does, spelt nearly so, or with the same last name."""
    known = [*leaves(), *sections(), *others]
    if endings := [other for other in known if other.endswith(f".{key}")]:
        return endings[:3]
    alike = {
        other: difflib.SequenceMatcher(None, key, other).ratio()
        for other in difflib.get_close_matches(key, known, n=3, cutoff=0.75)
    }
    if alike:
        return [other for other, ratio in alike.items() if ratio > max(alike.values()) - 0.02]
    last = key.rsplit(".", 1)[-1]
    same_last = [other for other in known if other.rsplit(".", 1)[-1] == last]
    return sorted(same_last, key=lambda other: -difflib.SequenceMatcher(None, key, other).ratio())[:3]


def get(config: Config, key: str) -> Any:
    """Returns the value of a key, which may lie in an open mapping."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


def settings(config: Config) -> dict[str, Any]:
    """Returns every key with its value as files of a run show it: with *** for a secret."""
    return {key: masked(get(config, key), key) for key in leaves()}


def put(config: Config, key: str, value: Any) -> None:
    parent, _, name = key.rpartition(".")
    setattr(get(config, parent), name, value)
