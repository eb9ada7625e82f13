"""Secrets among the settings: files, pages, loggers and messages of a run show *** in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"(.*[._-])?(api[_-]?key|(access|private|secret)[_-]?key|password|passwd|passphrase|secret|credentials?|authorization)",
    re.IGNORECASE,
)
_MAYBE = re.compile(r"(.*[._-])?token|key", re.IGNORECASE)
"""Names of secrets, and of other settings too: `eos_token`, a `key` of a column."""
_RANDOM = re.compile(r"[\w.~+/=-]{12,}", re.ASCII)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def masked(value: Any, name: str = "") -> Any:
    """Returns a setting, or a nested mapping of settings, with *** for every password, key and login of a URL."""
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if value and (_SECRET.fullmatch(name) or (_MAYBE.fullmatch(name) and _RANDOM.fullmatch(value))):
        return HIDDEN
    return _LOGIN.sub(HIDDEN, value)
