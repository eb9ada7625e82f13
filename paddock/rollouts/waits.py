"""What a conversation waits for: a turn of the policy, or something that runs beside the decode."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from paddock.engines.rollout.base import Completion

Waits = Generator["Wanted | Future[Any]", Any, Any]


@dataclass(frozen=True)
class Wanted:
    """Asks for the policy's next turn."""

    tokens: list[int]
    """The prompt, and all spans so far."""
    start: int
    """Tokens of the response so far."""
    limit: int
    """Most tokens of the turn."""
    keep: bool
    """True if another turn may follow: the engine keeps keys and values."""
    anew: bool = False
    """True if the tokens are not those of the turn before and more: what the engine keeps of it is of no use."""
    written: int = 0
    """Tokens at the end of `tokens` that are the turn's own: an earlier session drew them."""

    def after(self, part: Completion) -> Wanted:
        """Asks for the rest of a turn that a pause interrupted."""
        count = len(part.tokens)
        return replace(
            self,
            tokens=self.tokens + part.tokens,
            start=self.start + count,
            limit=self.limit - count,
            written=self.written + count,
        )


class TimeLimit(Exception):
    """Raised in a conversation whose call took longer than `multi_turn.tool_timeout`."""
