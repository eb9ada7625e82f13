"""Configs that are dataclasses and mappings at once, under verl's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar


@dataclass(eq=False)
class BaseConfig(Mapping[str, Any]):
    """Reads its fields by attribute, by key and by `get`. A field is set once, unless `_mutable_fields` names it."""

    _mutable_fields: ClassVar[set[str]] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and name not in self._mutable_fields:
            raise FrozenInstanceError(f"{type(self).__name__}.{name} is set already, and does not change")
        object.__setattr__(self, name, value)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (each.name for each in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __contains__(self, key: object) -> bool:
        return key in list(self)
