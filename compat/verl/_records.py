"""Records with named fields, as far as plug-ins use pydantic's models: pydantic need not be installed."""

from __future__ import annotations

import copy
import json
import types
import typing
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Self


class Record:
    """Holds the fields that a class annotates: those without a default are needed, and unknown ones left out."""

    def __init__(self, **given: Any):
        self.model_fields_set = {name for name in given if name in hints_of(type(self))}
        for name, hint in hints_of(type(self)).items():
            if name in given:
                setattr(self, name, converted(given[name], hint) if holds_records(hint) else given[name])
            elif hasattr(type(self), name):
                setattr(self, name, copy.deepcopy(getattr(type(self), name)))
            else:
                raise ValueError(f"{type(self).__name__} needs {name!r}; it is given {sorted(given)}")

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ValueError(f"{cls.__name__} is made of a mapping, not of {obj!r:.80}")
        return cls(**obj)

    def model_dump(
        self, *, exclude_unset: bool = False, exclude_none: bool = False, exclude: Collection[str] = (), **_: Any
    ) -> dict[str, Any]:
        options = {"exclude_unset": exclude_unset, "exclude_none": exclude_none}
        names = [name for name in hints_of(type(self)) if name not in exclude]
        if exclude_unset:
            names = [name for name in names if name in self.model_fields_set]
        found = {name: dumped(getattr(self, name), options) for name in names}
        return {name: value for name, value in found.items() if not (exclude_none and value is None)}

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        return json.dumps(self.model_dump(**options), indent=indent, ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        found = copy.deepcopy(self) if deep else copy.copy(self)
        found.__dict__.update(update or {})
        return found

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.model_dump() == other.model_dump()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in hints_of(type(self)))
        return f"{type(self).__name__}({fields})"


@lru_cache
def hints_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@lru_cache
def holds_records(hint: Any) -> bool:
    """True if a value under this hint may be or hold a record; token ids, of which there are many, do not."""
    if isinstance(hint, type) and issubclass(hint, Record):
        return True
    return any(holds_records(one) for one in typing.get_args(hint))


def converted(value: Any, hint: Any) -> Any:
    """Returns mappings as the records that the hint names, also within lists and mappings."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [one for one in inner if one is not type(None)]
        return value if value is None or len(kinds) > 1 else converted(value, kinds[0])
    if isinstance(hint, type) and issubclass(hint, Record) and isinstance(value, Mapping):
        return hint(**value)
    if origin is dict and isinstance(value, Mapping):
        return {key: converted(one, inner[1]) for key, one in value.items()}
    if origin is list and isinstance(value, list | tuple):
        return [converted(one, inner[0]) for one in value]
    return value


def dumped(value: Any, options: Mapping[str, bool]) -> Any:
    if isinstance(value, Record):
        return value.model_dump(**options)
    if isinstance(value, Mapping):
        return {key: dumped(one, options) for key, one in value.items()}
    return [dumped(one, options) for one in value] if isinstance(value, list | tuple) else value
