"""Messages of a conversation under verl's name."""

from __future__ import annotations

from typing import Any

from verl._records import Record


class Message(Record):
    """Holds one message."""

    role: str
    content: Any
    tool_calls: list[Any] | None = None
