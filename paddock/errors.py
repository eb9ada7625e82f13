"""Errors that the user can mend. Every floor may raise one; the doors print it without a traceback and exit with 2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

EXIT_CODE = 2
FIX = "\n  fix: "
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(Exception):
    """Says what was asked, why it cannot be done, and what to do instead: an error that the caller can mend.

    >>> import paddock
    >>> try:
    ...     paddock.Run(stpes=3)
    ... except paddock.UserError as error:
    ...     print(error.value, "|", error.reason, "|", error.fix.partition("?")[0])
    stpes | is no keyword | did you mean 'steps'
    """

    def __init__(self, reason: str, *, key: str | None = None, value: Any = None, fix: str | None = None):
        self.key = key
        self.value = value
        self.reason = reason
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        key = self.key or ""
        between = " " if key.startswith("paddock ") else "="  # a command and its argument, or a key and its value
        subject = key if self.key is None or self.value is None else f"{key}{between}{self.value}"
        text = f"{subject}: {self.reason}" if subject else self.reason
        return printable(f"{text}{FIX}{self.fix}" if self.fix else text)


def printable(text: str) -> str:
    """Returns the text with its control characters written out: an escape sequence in it does not reach a terminal."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def together(errors: Sequence[UserError]) -> UserError:
    """Returns one error that tells all of them, so that a command is mended at once; a single one as it is."""
    if len(errors) == 1:
        return errors[0]
    told = "\n".join(f"  {error}".replace(FIX, "; ") for error in errors)
    return UserError(f"{len(errors)} settings are refused:\n{told}", fix="mend them all, or leave them out")
