"""Environments that come with the package: a calculator for products, and a game of guessing a number.

Both speak plain text, a few bytes a turn: the embedded model learns in them in minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paddock.core.registry import suggest
from paddock.environments.environment import Answer, Environment, Turn
from paddock.environments.packages import refused
from paddock.environments.tools import tool


class Calculator(Environment):
    """Asks the row's product, which the policy may have multiplied by a tool: ``12*34=``, ``[mul(a=12, b=34)]``,
    ``408=``, ``408``. The row's rule pays."""

    inline, max_turns, call_format = True, 3, "pythonic"

    @tool
    def mul(self, a: int, b: int) -> str:
        """Multiplies two numbers."""
        return f"{a * b}="


class Guess(Environment):
    """Thinks of a number of two digits, and says to each guess whether it is larger (>) or smaller (<).

    Pays 1 for the number, less a tenth for every guess before it; nothing if seven guesses do not find it.
    """

    inline, max_turns = True, 7

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.number = 10 + seed % 90
        return "?"

    def step(self, answer: Answer) -> Turn:
        text = answer.text.strip()
        if not (text.isascii() and text.isdigit()) or len(text) != 2:
            return Turn(done=True)
        if int(text) == self.number:
            return Turn(reward=1.0 - 0.1 * answer.number, done=True)
        return Turn(">" if self.number > int(text) else "<")


BUILT_IN: dict[str, type[Environment]] = {"calculator": Calculator, "guess": Guess}


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes the environment of this name."""
    if name not in BUILT_IN:
        raise refused(f"builtin:{name}", "there is no such environment", suggest(name, sorted(BUILT_IN)))
    return lambda: BUILT_IN[name](**kwargs)
