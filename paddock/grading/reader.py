r"""Reads an expression in canonical notation (see notation.py) into a tree of `Node`s.

The grammar is that of answers, not of all LaTeX: numbers, letters, the four operations, powers, roots, functions,
binomials, matrices. `\frac` and its kin take their arguments as TeX does: `\frac12`, `\frac \pi4`, `\frac{\sqrt3}2`. An
integer before a proper fraction is a mixed number. Any other notation raises Unread. The reader never goes back, so its
time is linear.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from paddock.grading.limits import DEEPEST, TooLarge, Unread
from paddock.grading.notation import ROW


@dataclass(frozen=True)
class Node:
    """`Node("+", (a, b))`. The leaves are numbers, `Node("number", value=Fraction(1, 2))`, and letters."""

    kind: str
    parts: tuple[Node, ...] = ()
    value: Fraction | None = None
    name: str = ""
    digits: int | None = None
    """How many digits stand after the decimal point of a written decimal; None for any other number."""


NUMBER = re.compile(r"(\d+\.\d+|\d+\.(?!\.)|\.\d+|\d+)(?:[eE]([+-]?\d{1,4})(?![\d.]))?")
REPEATING = re.compile(
    r"(\d*)\.(\d*)(?:\\overline\s*\{\s*(\d+)\s*\}|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?|\((\d+)\)(?![\d(]))"
)
ELLIPSIS = re.compile(r"(\d*)\.(\d+)\s*…")
MIXED = re.compile(
    r"(\d+)(?: +(\d+) ?/ ?(\d+)| *\\frac *"
    r"(?:\{ *(\d+) *\} *\{ *(\d+) *\}|\{ *(\d+) *\} *(\d)|(\d) *\{ *(\d+) *\}|(\d) *(\d)))(?![\d.])"
)
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh ln log lg exp gcd lcm max min"
GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell"
)
FUNCTION_NAMES, GREEK_NAMES = frozenset(FUNCTIONS.split()), frozenset(GREEK.split())
APPLIED = frozenset("fgh")
"""Letters that before a bracket are functions, not factors."""
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "⌊": "⌋", "⌈": "⌉"}
AROUND = {"(": "same", "[": "same", "{": "same", "|": "abs", "⌊": "floor", "⌈": "ceil"}
WORD = re.compile(r"\\([A-Za-z]+)")


def read(text: str) -> Node:
    """Returns the tree of the whole text."""
    reader = Reader(text)
    tree = reader.sum()
    if reader.peek():
        raise Unread(reader.rest())
    return tree


class Reader:
    """A position in the text, and one method for each rule of the grammar."""

    def __init__(self, text: str):
        self.text, self.at, self.depth, self.bars = text, 0, 0, 0

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def rest(self) -> str:
        return self.text[self.at :]

    def command(self) -> str:
        r"""The name of the command that follows, `frac` of `\frac`; empty where there is none."""
        self.peek()
        match = WORD.match(self.text, self.at)
        return match[1] if match else ""

    def skip(self, sign: str) -> bool:
        if not sign or self.peek() != sign[0] or not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        return True

    def expect(self, sign: str) -> None:
        if not self.skip(sign):
            raise Unread(self.rest())

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise TooLarge(f"more than {DEEPEST} levels")

    def sum(self) -> Node:
        self.deeper()
        tree = self.product()
        while self.peek() in ("+", "-"):
            negative = self.skip("-") or not self.skip("+")
            term = self.product()
            tree = Node("+", (tree, Node("neg", (term,)) if negative else term))
        self.depth -= 1
        return tree

    def product(self) -> Node:
        if self.peek() in ("+", "-"):
            negative = self.skip("-") or not self.skip("+")
            self.deeper()
            tree = self.product()
            self.depth -= 1
            return Node("neg", (tree,)) if negative else tree
        tree = self.power()
        while True:
            if self.skip("*"):
                tree = Node("*", (tree, self.signed()))
            elif self.skip("/"):
                tree = Node("/", (tree, self.signed()))
            elif self.begins_factor():
                if (self.peek().isdigit() or self.peek() == ".") and not self.text[: self.at].rstrip().endswith("!"):
                    raise Unread("a number directly after a factor")  # `2 3`, `x2`, but `3!7!` is a product
                tree = Node("*", (tree, self.power()))
            else:
                return tree

    def signed(self) -> Node:
        if self.peek() not in ("+", "-"):
            return self.power()
        negative = self.skip("-") or not self.skip("+")
        return Node("neg", (self.power(),)) if negative else self.power()

    def begins_factor(self) -> bool:
        sign = self.peek()
        if sign == "|":
            return self.bars == 0
        if sign == "\\":
            return self.command() not in ("choose", "text", "pmod", "bmod", "mod")
        return sign.isalnum() or sign in tuple("([{⌊⌈⟦.∞")

    def power(self) -> Node:
        base = self.atom()
        while True:
            sign = self.peek()
            if sign == "!":
                self.at += 1
                base = Node("!", (base,))
            elif sign == "°":
                self.at += 1
                base = Node("degrees", (base,))
            elif sign == "%":
                self.at += 1
                base = Node("/", (base, Node("number", value=Fraction(100))))
            elif sign == "'" and base.kind == "letter":
                self.at += 1
                base = Node("letter", name=base.name + "'")
            elif sign == "^":
                self.at += 1
                base = self.raised(base)
            else:
                return base

    def raised(self, base: Node) -> Node:
        if re.match(r" *(?:\{ *)?(?:T|\\top|\\intercal)\b", self.rest()) and base.kind == "matrix":
            self.argument(whole_number=True)
            return Node("transpose", (base,))
        if self.skip("'"):
            return Node("letter", name=base.name + "'") if base.kind == "letter" else base
        exponent = self.argument(whole_number=True)
        self.deeper()
        while self.skip("^"):  # from the right: 2^3^2 is 2^9
            exponent = self.raised(exponent)
        self.depth -= 1
        return Node("^", (base, exponent))

    def argument(self, whole_number: bool = False) -> Node:
        """Reads what a command or `^` takes: a group, a command with its arguments, one character; of `2^10`, `10`."""
        sign = self.peek()
        if sign == "{":
            return self.bracketed()
        if sign == "(" and whole_number:
            return self.bracketed()
        if sign == "-" and whole_number:
            self.at += 1
            return Node("neg", (self.argument(whole_number),))
        if sign.isdigit():
            digits = re.compile(r"\d+").match(self.text, self.at) if whole_number else None
            number = digits[0] if digits else sign
            self.at += len(number)
            return Node("number", value=Fraction(int(number)))
        if sign.isalpha() and sign.isascii():
            self.at += 1
            return letter(sign)
        if sign == "\\":
            return self.atom()
        raise Unread(self.rest())

    def bracketed(self) -> Node:
        opening = self.peek()
        self.at += 1
        outer, self.bars = self.bars, int(opening == "|")
        tree = self.sum()
        if opening == "{" and self.command() == "choose":
            self.at += len(r"\choose")
            tree = Node("binom", (tree, self.sum()))
        self.expect(CLOSING[opening])
        self.bars = outer
        around = AROUND[opening]
        return tree if around == "same" else Node(around, (tree,))

    def atom(self) -> Node:
        sign = self.peek()
        if sign.isdigit() or sign == ".":
            return self.number()
        if sign in CLOSING and sign:
            return self.bracketed()
        if sign == "⟦":
            return self.matrix()
        if sign == "∞":
            self.at += 1
            return Node("infinity")
        if sign.isalpha() and sign.isascii():
            return self.letters()
        if sign == "\\":
            return self.named()
        raise Unread(self.rest())

    def number(self) -> Node:
        if (match := MIXED.match(self.text, self.at)) and (fraction := mixed(match)) is not None:
            self.at = match.end()
            return Node("mixed", value=fraction)
        for pattern, endless in ((REPEATING, repeating), (ELLIPSIS, continued)):
            if match := pattern.match(self.text, self.at):
                self.at = match.end()
                return Node("number", value=endless(match))
        match = NUMBER.match(self.text, self.at)
        if not match:
            raise Unread(self.rest())
        self.at = match.end()
        whole, _, decimals = match[1].partition(".")
        value = Fraction(int(whole or "0")) + (Fraction(int(decimals), 10 ** len(decimals)) if decimals else 0)
        if match[2]:
            return Node("number", value=value * Fraction(10) ** int(match[2]))
        return Node("number", value=value, digits=len(decimals) if "." in match[1] else None)

    def letters(self) -> Node:
        name = self.text[self.at]
        self.at += 1
        tree = letter(name)
        if tree.kind == "letter" and self.skip("_"):
            tree = Node("letter", name=f"{name}_{self.subscript()}")
        if name == "C" and re.match(r" *\([^(),]+,[^(),]+\)", self.rest()):
            return Node("binom", self.arguments().parts)
        if name in APPLIED and self.peek() == "(":
            return Node("apply", (self.arguments(),), name=tree.name)
        return tree

    def subscript(self) -> str:
        if self.peek() == "{":
            start, depth = self.at, 0
            for place in range(start, len(self.text)):
                depth += (self.text[place] == "{") - (self.text[place] == "}")
                if depth == 0:
                    self.at = place + 1
                    return self.text[start + 1 : place].replace(" ", "")
            raise Unread("an open subscript")
        match = re.compile(r"\d+|[A-Za-z]|\\[A-Za-z]+").match(self.text, self.at)
        if not match:
            raise Unread(self.rest())
        self.at = match.end()
        return match[0]

    def arguments(self) -> Node:
        """`(a, b)` after a function; `\\max⦃a, b⦄` as well."""
        closing = "⦄" if self.skip("⦃") else ")"
        if closing == ")":
            self.expect("(")
        found = [self.sum()]
        while self.skip(","):
            found.append(self.sum())
        self.expect(closing)
        return found[0] if len(found) == 1 else Node("list", tuple(found))

    def named(self) -> Node:
        name = self.command()
        self.at += 1 + len(name)
        if name == "frac":
            return Node("/", (self.argument(), self.argument()))
        if name == "binom":
            return Node("binom", (self.argument(), self.argument()))
        if name == "sqrt":
            degree = Node("number", value=Fraction(2))
            if self.skip("["):
                degree = self.sum()
                self.expect("]")
            inside = self.bracketed() if self.peek() == "(" else self.argument()
            return Node("root", (inside, degree))
        if name == "pi":
            return Node("pi")
        if name in GREEK_NAMES:
            return Node("letter", name=f"{name}_{self.subscript()}" if self.skip("_") else name)
        if name in FUNCTION_NAMES:
            return self.function(name)
        raise Unread(name)

    def function(self, name: str) -> Node:
        base: tuple[Node, ...] = ()
        if name == "log" and self.skip("_"):
            base = (self.argument(),)
        exponent = None
        if self.skip("^"):
            exponent = self.argument(whole_number=True)
        if name == "log" and not base and self.skip("_"):
            base = (self.argument(),)
        if self.peek() in ("(", "⦃"):
            inside = self.arguments()
            while self.peek() == "!":
                self.at += 1
                inside = Node("!", (inside,))
        else:
            inside = self.unbracketed()
        inverse = exponent == Node("neg", (Node("number", value=Fraction(1)),))
        if inverse and name in ("sin", "cos", "tan", "cot"):
            return Node("call", (inside,), name=f"arc{name}")
        tree = Node("call", (inside, *base), name=name)
        return Node("^", (tree, exponent)) if exponent else tree

    def unbracketed(self) -> Node:
        r"""The argument of `\sin 2x \cos x` is `2x`: factors without a sign between them, up to the next function."""
        self.deeper()
        tree = self.signed()
        while self.begins_factor() and self.command() not in FUNCTION_NAMES and not self.peek().isdigit():
            tree = Node("*", (tree, self.power()))
        self.depth -= 1
        return tree

    def matrix(self) -> Node:
        self.expect("⟦")
        rows: list[list[Node]] = [[]]
        while not self.skip("⟧"):
            rows[-1].append(self.sum())
            if self.skip(ROW):
                rows.append([])
            elif not self.skip("&") and self.peek() != "⟧":
                raise Unread(self.rest())
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) != 1:
            raise Unread("rows of different lengths")
        return Node("matrix", tuple(Node("list", tuple(row)) for row in rows))


def letter(name: str) -> Node:
    return Node({"i": "i", "e": "e"}.get(name, "letter"), name=name)


def mixed(match: re.Match[str]) -> Fraction | None:
    """Returns the mixed number; None unless the fraction is proper: `2\\frac{5}{3}` is a product."""
    whole, above, below = (int(digits) for digits in match.groups() if digits)
    return Fraction(whole) + Fraction(above, below) if 0 < above < below else None


def repeating(match: re.Match[str]) -> Fraction:
    r"""`0.1\overline{6}` = 1/6"""
    whole, fixed, overlined, first, between, last, bracketed = (part or "" for part in match.groups())
    return _periodic(whole, fixed, overlined or bracketed or first + between + last)


def continued(match: re.Match[str]) -> Fraction:
    """`0.333…` = 1/3, if the end of the digits repeats three times."""
    whole, digits = match.groups()
    for length in range(1, len(digits) // 3 + 1):
        period = digits[-length:]
        if digits.endswith(period * 3):
            return _periodic(whole, digits[: -3 * length], period)
    raise Unread("digits without a period")


def _periodic(whole: str, fixed: str, period: str) -> Fraction:
    start = Fraction(int((whole + fixed) or "0"), 10 ** len(fixed))
    return start + Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
