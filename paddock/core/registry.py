"""Named things: estimators, losses and whatever else a config key chooses by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from paddock.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names and their aliases to objects of one kind, e.g. ``Registry("advantage estimator")``."""

    def __init__(self, kind: str, key: str | None = None):
        self.kind = kind
        self.key = key
        self._entries: dict[str, T] = {}
        self._definitions: dict[str, str | None] = {}

    def register(self, name: str, *aliases: str, by: Callable[..., Any] | None = None) -> Callable[[T], T]:
        """Decorator that files an object under ``name`` and its aliases; a name is given away once.

        `by`: the function that defines it. Defined again, by the same module under the same name, it is replaced: a
        cell of a notebook runs more than once.
        """
        definition = None if by is None else f"{by.__module__}.{by.__qualname__}"

        def file(entry: T) -> T:
            for each in (name, *aliases):
                again = definition is not None and self._definitions.get(each) == definition
                if not again and self._entries.get(each, entry) is not entry:
                    raise ValueError(f"{self.kind} {each!r} is registered already, as {self._entries[each]!r}")
                self._entries[each], self._definitions[each] = entry, definition
            return entry

        return file

    def get(self, name: str) -> T:
        if name not in self._entries:
            raise UserError(
                f"there is no {self.kind} named {name!r}",
                key=self.key,
                value=name if self.key else None,
                fix=suggest(name, self.names()),
            )
        return self._entries[name]

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


def suggest(name: str, known: list[str]) -> str:
    """The closest known name, if one is close, then all of them."""
    close = difflib.get_close_matches(str(name), known, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}known: {', '.join(known)}"
