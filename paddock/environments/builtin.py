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
    """Thinks of a digit, and says to each guess whether it is larger (>) or smaller (<), or that it is no digit (#).

    Pays 1 for the digit, less a tenth for every guess before it; nothing if five guesses do not find it. Who halves
    what is left gets 0.81 on average.
    """

    inline, max_turns = True, 5

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.digit = str(seed % 10)
        return "?"

    def step(self, answer: Answer) -> Turn:
        if answer.text == self.digit:
            return Turn(reward=1.0 - 0.1 * answer.number, done=True)
        if len(answer.text) != 1 or answer.text not in "0123456789":
            return Turn("#")
        return Turn(">" if self.digit > answer.text else "<")


BUILT_IN: dict[str, type[Environment]] = {"calculator": Calculator, "guess": Guess}


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes the environment of this name."""
    if name not in BUILT_IN:
        raise refused(f"builtin:{name}", "there is no such environment", suggest(name, sorted(BUILT_IN)))
    return lambda: BUILT_IN[name](**kwargs)
