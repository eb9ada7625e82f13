"""A problem is a function to write: its words, its reference solution, and arguments that tell right from wrong."""

from __future__ import annotations

import copy
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Template
from typing import Any, TypeVar

CANDIDATES = 14  # arguments that a family draws, beside its edge cases
TESTS = 10  # most tests of one problem
FEWEST = 5  # tests
WIDTH = 88  # columns of a docstring
WORDS = (
    *("amber", "basin", "candle", "delta", "ember", "fjord", "garden", "harbor", "island", "jungle", "kettle", "lemon"),
    *("meadow", "needle", "orchid", "pepper", "quartz", "river", "saddle", "timber", "umber", "velvet", "willow"),
    *("xenon", "yellow", "zephyr", "ant", "bee", "cob", "dew", "elk", "fig", "gum", "hop", "ivy", "jam", "kit", "oak"),
)
GOODS = ("apples", "bolts", "coins", "disks", "eggs", "forks", "gears", "hats")
NAMES = ("ada", "ben", "cleo", "dan", "eve", "finn", "gus", "hana")

Arguments = tuple[Any, ...]
Option = TypeVar("Option")


class Draw(random.Random):
    """Draws rules, constants and arguments; the same seed draws the same."""

    def one(self, *options: Option) -> Option:
        return options[self.randrange(len(options))]

    def some(self, arguments: Callable[[], Arguments]) -> list[Arguments]:
        return [arguments() for _ in range(CANDIDATES)]

    def numbers(self, low: int, high: int, fewest: int = 3, most: int = 9) -> list[int]:
        return [self.randint(low, high) for _ in range(self.randint(fewest, most))]

    def letters(self, alphabet: str, fewest: int = 4, most: int = 14) -> str:
        return "".join(self.one(*alphabet) for _ in range(self.randint(fewest, most)))

    def words(self, fewest: int = 2, most: int = 6) -> list[str]:
        return [self.one(*WORDS) for _ in range(self.randint(fewest, most))]

    def mixed(self, fewest: int = 2, most: int = 5) -> str:
        """Words of which some have a capital or a number."""
        shapes = (str, str, str.capitalize, str.upper, lambda word: f"{word}{self.randint(0, 99)}")
        return " ".join(self.one(*shapes)(word) for word in self.words(fewest, most))

    def table(self, keys: Sequence[str], low: int, high: int, fewest: int = 2, most: int = 6) -> dict[str, int]:
        return {key: self.randint(low, high) for key in self.sample(keys, self.randint(fewest, min(most, len(keys))))}

    def grid(self, low: int, high: int, square: bool = False) -> list[list[int]]:
        height, width = self.randint(2, 4), self.randint(2, 4)
        return [[self.randint(low, high) for _ in range(height if square else width)] for _ in range(height)]


@dataclass(frozen=True)
class Problem:
    """A function: how it is called, what it shall do, one way to do it, and arguments to test it with."""

    name: str
    takes: Mapping[str, str]
    """Parameter -> its type."""
    gives: str
    says: str
    body: str
    """The reference solution, without its header."""
    inputs: Sequence[Arguments]
    edges: Sequence[Arguments] = ()
    """Arguments that tests have but no example shows."""

    def header(self, style: str) -> str:
        """`style` is that of the type hints: `builtin`, `typing`, or `none`."""
        given = ", ".join(self.takes if style == "none" else (f"{name}: {kind}" for name, kind in self.takes.items()))
        line = f"def {self.name}({given})" + (":" if style == "none" else f" -> {self.gives}:")
        if style != "typing":
            return line
        used = [name for name in ("list", "dict", "tuple") if f"{name}[" in line]
        for name in used:
            line = line.replace(f"{name}[", f"{name.capitalize()}[")
        names = ", ".join(sorted(name.capitalize() for name in used))
        return f"from typing import {names}\n\n\n{line}" if used else line

    def solution(self) -> str:
        """The reference as a whole function."""
        return f"{self.header('builtin')}\n{textwrap.indent(self.body, '    ')}\n"

    def results(self) -> list[tuple[Arguments, Any]]:
        """Distinct arguments, edge cases first, with what the reference returns."""
        scope: dict[str, Any] = {}
        exec(self.solution(), scope)
        found: dict[str, tuple[Arguments, Any]] = {}
        for given in (*self.edges, *self.inputs):
            found.setdefault(repr(given), (given, scope[self.name](*copy.deepcopy(given))))
        return list(found.values())

    @cached_property
    def cases(self) -> list[tuple[Arguments, Any]]:
        """The tests. Results that occur seldom come first among the drawn ones: they tell more."""
        results = self.results()
        edges, drawn = results[: len(self.edges)], results[len(self.edges) :]
        fresh, again, seen = [], [], set()
        for case in drawn:
            (again if repr(case[1]) in seen else fresh).append(case)
            seen.add(repr(case[1]))
        return [*edges, *fresh, *again][:TESTS]

    def is_tested(self) -> bool:
        """True if there are enough tests, and no constant passes them."""
        cases = self.cases
        return len(cases) >= FEWEST and len({repr(result) for _, result in cases}) > 1

    def examples(self) -> list[tuple[Arguments, Any]]:
        """Two of the tests, those first in which something was found and changed."""
        drawn = [case for case in self.cases if case[0] not in self.edges]
        return sorted(drawn, key=lambda case: case[1] in (-1, None, "", [], {}) or case[1] in case[0])[:2]

    def prompt(self, hints: str, shown: str) -> str:
        """Header and docstring. `shown` is the form of the examples: `session`, `equal` or `returns`."""
        lines = [line for part in self.says.splitlines() for line in textwrap.wrap(part, WIDTH)]
        forms = {"session": ">>> {}\n{}", "equal": "{} == {}", "returns": "{} returns {}"}
        examples = [forms[shown].format(call(self.name, given), repr(result)) for given, result in self.examples()]
        lines += [] if shown == "session" else ["", "Examples:"]
        lines += "\n".join(examples).splitlines()
        text = textwrap.indent("\n".join(lines), "    ").lstrip()
        return f'{self.header(hints)}\n    """{text}\n    """\n'

    def test(self) -> str:
        """The function `check`, as HumanEval has it."""
        lines = []
        for given, result in self.cases:
            if isinstance(result, float):
                lines.append(f"    assert abs({call('candidate', given)} - {result!r}) < 1e-6")
            else:
                lines.append(f"    assert {call('candidate', given)} == {result!r}")
        return "\n".join(["def check(candidate):", *lines, ""])


def call(name: str, given: Arguments) -> str:
    return f"{name}({', '.join(map(repr, given))})"


Family = Callable[[Draw], Problem]
FAMILIES: dict[str, Family] = {}


def family(function: Family) -> Family:
    """Registers a function that draws a problem."""
    FAMILIES[function.__name__] = function
    return function


def made(
    name: str,
    takes: Mapping[str, str],
    gives: str,
    says: str,
    body: str,
    inputs: Sequence[Arguments],
    edges: Sequence[Arguments] = (),
    *,
    values: Mapping[str, object],
) -> Problem:
    """A problem whose texts have `$name` in place of the drawn `values`, which may have it too."""
    texts = [textwrap.dedent(text).strip("\n") for text in (name, gives, says, body)]
    while any("$" in text for text in texts):
        texts = [Template(text).substitute(values) for text in texts]
    filled = dict(zip(("name", "gives", "says", "body"), texts, strict=True))
    return Problem(takes=takes, inputs=inputs, edges=edges, **filled)
