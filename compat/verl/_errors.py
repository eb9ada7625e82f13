"""Errors of the types that callers of verl's functions catch, which are Paddock's errors of users at the same time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from paddock.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


class BadValue(UserError, ValueError, NotImplementedError):
    """A value that cannot be used, or a name that nothing has."""


class BadType(UserError, TypeError):
    """A value of a type that cannot be used."""


def raises_value_errors(function: F) -> F:
    """The function, whose errors of users are ValueErrors too."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (BadValue, BadType):
            raise
        except UserError as error:
            raise BadValue(error.reason, key=error.key, value=error.value, fix=error.fix) from error

    return call  # type: ignore[return-value]


def require_no_boolean(**thresholds: Any) -> None:
    for name, value in thresholds.items():
        if isinstance(value, bool):
            raise BadType("is a number or a text, and not a boolean", key=name, value=value)
