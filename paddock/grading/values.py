"""Values of expressions: exact fractions where possible, else 60 digits; letters take sample values.

Two expressions with letters are compared at sample points: polynomials and rational functions exactly, all others to 40
of 60 digits. That decides what `simplify` decides in a hundredth of its time, and its cost has a bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath import MPContext

from paddock.grading.limits import MOST_BITS, TooLarge, Unread
from paddock.grading.reader import Node

MP: Any = MPContext()
MP.dps = 60
TOLERANCE = MP.mpf(10) ** -40
ZERO = MP.mpf(10) ** -50
LARGEST_EXPONENT = 5_000  # bits of an argument of exp; beyond it the result would not fit into memory
LARGEST_FACTORIAL = 10_000
POINTS = 12  # sample points at most
ENOUGH = 4  # points at which both expressions are defined
Value = Any
"""A Fraction, a number of mpmath, or a matrix: a tuple of rows."""


class SampledValue:
    """One point: the value of each letter there, and the base of a bare `log`."""

    def __init__(self, number: int | None, natural: bool = False):
        """`number`: None for an expression without letters."""
        self.number, self.natural = number, natural
        self.outside = False
        """An even root or a logarithm had an argument that is not a positive real: outside the real domain."""

    def letter(self, name: str) -> Fraction:
        """Positive at the first points, of either sign later; of size 1/8 to 8."""
        if self.number is None:
            raise Unread(name)
        return drawn(name, self.number)


@lru_cache(maxsize=4096)
def drawn(name: str, number: int) -> Fraction:
    digest = hashlib.blake2b(f"{number}:{name}".encode(), digest_size=4).digest()
    size = Fraction(17 + int.from_bytes(digest[:2], "big") % 1007, 128)
    return -size if number >= POINTS // 3 and digest[2] % 2 else size


def letters_of(tree: Node) -> frozenset[str]:
    if tree.kind in ("letter", "apply"):
        return frozenset({tree.name}).union(*map(letters_of, tree.parts))
    return frozenset().union(*map(letters_of, tree.parts))


def equal(one: Node, other: Node) -> bool:
    """True if the two have the same value at every point."""
    if one == other:
        return True
    bases = (False, True) if has_bare_log(one) or has_bare_log(other) else (False,)
    return any(_equal(one, other, natural) for natural in bases)


def _equal(one: Node, other: Node, natural: bool) -> bool:
    if not letters_of(one) and not letters_of(other):
        sample = SampledValue(None, natural)
        return same(valued(one, sample), valued(other, sample))
    pairs = sampled(one, other, natural)
    return bool(pairs) and all(same(*pair) for pair in pairs)


def proportional(one: Node, other: Node, positive: bool) -> bool:
    """True if one is a constant multiple of the other, as the two sides of `2x - 2y = 0` and `x = y` are."""
    ratios = []
    for first, second in sampled(one, other, False):
        if is_matrix(first) or is_matrix(second) or is_zero(first) or is_zero(second):
            return False
        ratios.append(divided(first, second, SampledValue(None)))
    return bool(ratios) and all(same(ratio, ratios[0]) for ratio in ratios) and (not positive or sign(ratios[0]) == 1)


def sampled(one: Node, other: Node, natural: bool) -> list[tuple[Value, Value]]:
    """Values at points in the real domain of both; if there are too few, at any point."""
    inside, anywhere = [], []
    for number in range(POINTS):
        here, there = SampledValue(number, natural), SampledValue(number, natural)
        try:
            pair = valued(one, here), valued(other, there)
        except ZeroDivisionError:
            continue
        anywhere.append(pair)
        if not here.outside and not there.outside:
            inside.append(pair)
        if len(inside) == ENOUGH and number >= POINTS // 3:  # so that some have negative letters
            break
    return inside if len(inside) > 1 else anywhere


def has_bare_log(tree: Node) -> bool:
    return (tree.kind == "call" and tree.name == "log" and len(tree.parts) == 1) or any(map(has_bare_log, tree.parts))


def same(one: Value, other: Value) -> bool:
    if is_matrix(one) or is_matrix(other):
        return (
            is_matrix(one) and is_matrix(other) and shape(one) == shape(other)
            and all(same(a, b) for rows in zip(one, other, strict=True) for a, b in zip(*rows, strict=True))
        )  # fmt: skip
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = inexact(one), inexact(other)
    if MP.isinf(one) or MP.isinf(other):
        return bool(one == other)
    if MP.isnan(one) or MP.isnan(other):
        return False
    size = max(abs(one), abs(other))
    return bool(size < ZERO or abs(one - other) <= TOLERANCE * size)


def rounds_to(written: Node, exact: Node, significant: int) -> bool:
    """True if the written decimal is the other's value, rounded to as many digits as it has, and has enough of them."""
    if written.kind == "neg" and written.parts[0].kind == "number":
        return rounds_to(written.parts[0], Node("neg", (exact,)), significant)
    if written.kind != "number" or not written.digits or written.value is None:
        return False
    scaled = written.value * 10**written.digits
    if len(str(int(scaled))) < significant:
        return False
    value = valued(exact, SampledValue(None))
    if is_matrix(value) or (isinstance(value, Fraction) and _terminates(value)):
        return False
    difference = inexact(value) - inexact(written.value)
    return not MP.isinf(difference) and bool(abs(difference) * 2 * MP.mpf(10) ** written.digits <= 1)


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def is_matrix(value: Value) -> bool:
    return isinstance(value, tuple)


def is_zero(value: Value) -> bool:
    return bool(value == 0) if isinstance(value, Fraction) else bool(abs(value) < ZERO)


def shape(value: tuple[Any, ...]) -> tuple[int, int]:
    return len(value), len(value[0])


def inexact(value: Value) -> Any:
    if is_matrix(value):
        raise Unread("a matrix where a number belongs")
    return MP.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def real(value: Value) -> Any:
    """Returns the value as a real number; Unread if it has an imaginary part."""
    value = inexact(value)
    if abs(MP.im(value)) > TOLERANCE * max(1, abs(value)):
        raise Unread("not a real number")
    return MP.re(value)


def sign(value: Value) -> int:
    """1, 0 or -1; 0 as well for a number that is not real."""
    if isinstance(value, Fraction):
        return (value > 0) - (value < 0)
    if is_zero(value) or abs(MP.im(value)) > TOLERANCE * abs(value):
        return 0
    return 1 if MP.re(value) > 0 else -1


def valued(tree: Node, sample: SampledValue) -> Value:
    """Returns the value of the tree at this point."""
    if tree.value is not None:
        return tree.value
    if tree.kind == "letter":
        return sample.letter(tree.name)
    if tree.kind == "apply":
        inside = [inexact(valued(part, sample)) for part in _listed(tree.parts[0])]
        weights = [inexact(drawn(f"{tree.name}/{place}", 0)) for place in range(len(inside))]
        return MP.sin(sum(weight * each for weight, each in zip(weights, inside, strict=True)))  # any function will do
    if tree.kind == "call":
        return called(tree, sample)
    if tree.kind == "matrix":
        return tuple(tuple(valued(part, sample) for part in row.parts) for row in tree.parts)
    if tree.kind in CONSTANTS:
        return CONSTANTS[tree.kind]()
    if tree.kind not in OPERATIONS:
        raise Unread(tree.kind)
    return OPERATIONS[tree.kind](*(valued(part, sample) for part in tree.parts), sample)


def _listed(tree: Node) -> tuple[Node, ...]:
    return tree.parts if tree.kind == "list" else (tree,)


def added(one: Value, other: Value, _: SampledValue) -> Value:
    if is_matrix(one) or is_matrix(other):
        if not (is_matrix(one) and is_matrix(other) and shape(one) == shape(other)):
            raise Unread("a sum of different shapes")
        return tuple(tuple(added(a, b, _) for a, b in zip(*rows, strict=True)) for rows in zip(one, other, strict=True))
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one + other
    return inexact(one) + inexact(other)


def multiplied(one: Value, other: Value, _: SampledValue) -> Value:
    if is_matrix(one) and is_matrix(other):
        raise Unread("a product of matrices")
    if is_matrix(other):
        one, other = other, one
    if is_matrix(one):
        return tuple(tuple(multiplied(each, other, _) for each in row) for row in one)
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return _bounded(one * other)
    return inexact(one) * inexact(other)


def divided(one: Value, other: Value, sample: SampledValue) -> Value:
    if is_matrix(other):
        raise Unread("a matrix below a fraction")
    if is_matrix(one):
        return tuple(tuple(divided(each, other, sample) for each in row) for row in one)
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return _bounded(one / other)
    if is_zero(other):
        raise ZeroDivisionError
    return inexact(one) / inexact(other)


def raised(base: Value, exponent: Value, sample: SampledValue) -> Value:
    if is_matrix(base) or is_matrix(exponent):
        raise Unread("a power of a matrix")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            times = exponent.numerator
            if abs(base) == 1 or (base == 0 and times > 0):
                return base ** (2 - abs(times) % 2)  # however large
            if _bits(base) * abs(times) <= MOST_BITS:
                return base**times
            if sample.number is None:  # rounding would lose what tells 10^{10^6} from 10^{10^6} + 1
                raise TooLarge("a power")
        elif base >= 0:
            return rooted(raised(base, Fraction(exponent.numerator), sample), Fraction(exponent.denominator), sample)
    base, exponent = inexact(base), inexact(exponent)
    if MP.isinf(base) or MP.isinf(exponent):
        raise Unread("a power of infinity")
    if is_zero(base):
        if sign(exponent) <= 0:
            raise ZeroDivisionError
        return Fraction(0)
    if not MP.isint(exponent) and sign(base) != 1:
        sample.outside = True
    return exponential(exponent * MP.log(base))


def exponential(argument: Any) -> Any:
    if MP.mag(argument) > LARGEST_EXPONENT if argument else False:
        raise TooLarge("an exponential")
    return MP.exp(argument)


def rooted(inside: Value, degree: Value, sample: SampledValue) -> Value:
    """The real root of a negative number if the degree is odd, as `\\sqrt[3]{-8} = -2`."""
    if is_matrix(inside) or not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree < 10_000:
        return raised(inside, divided(Fraction(1), degree, sample), sample)
    power = int(degree)
    if isinstance(inside, Fraction):
        above, below = _root(abs(inside.numerator), power), _root(inside.denominator, power)
        if above is not None and below is not None and (inside >= 0 or power % 2):
            return Fraction(above if inside >= 0 else -above, below)
    value = inexact(inside)
    if sign(value) == -1 and power % 2:
        return -MP.root(-value, power)
    if sign(value) != 1 and not is_zero(value):
        sample.outside = True
    return MP.root(value, power)


def _root(number: int, power: int) -> int | None:
    """Returns the exact root of a natural number."""
    if number < 2:
        return number
    if power == 2:
        root = math.isqrt(number)
    elif number.bit_length() < power:
        return None
    else:
        root = int(MP.nint(MP.root(number, power)))
    return root if root.bit_length() * power <= 2 * MOST_BITS and root**power == number else None


def factorial(value: Value, sample: SampledValue) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise ZeroDivisionError
        if value > LARGEST_FACTORIAL:
            raise TooLarge("a factorial")
        return Fraction(math.factorial(int(value)))
    if abs(inexact(value)) > LARGEST_FACTORIAL:
        raise TooLarge("a factorial")
    return MP.factorial(inexact(value))


def binomial(above: Value, below: Value, sample: SampledValue) -> Value:
    whole = isinstance(above, Fraction) and isinstance(below, Fraction) and above.denominator == below.denominator == 1
    if whole and 0 <= above <= LARGEST_FACTORIAL and below >= 0:
        return Fraction(math.comb(int(above), int(below)))
    if max(abs(inexact(above)), abs(inexact(below))) > LARGEST_FACTORIAL:
        raise TooLarge("a binomial")
    return MP.binomial(inexact(above), inexact(below))


def logarithm(value: Value, base: Value, sample: SampledValue) -> Value:
    value, base = inexact(value), inexact(base)
    if is_zero(value) or is_zero(base) or is_zero(base - 1):
        raise ZeroDivisionError
    if sign(value) != 1 or sign(base) != 1:
        sample.outside = True
    return MP.log(value) / MP.log(base)


CONSTANTS: dict[str, Callable[[], Any]] = {
    "pi": lambda: +MP.pi,
    "e": lambda: +MP.e,
    "i": lambda: MP.mpc(0, 1),
    "infinity": lambda: MP.inf,
}
OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": added,
    "neg": lambda value, sample: multiplied(value, Fraction(-1), sample),
    "*": multiplied,
    "/": divided,
    "^": raised,
    "root": rooted,
    "!": factorial,
    "binom": binomial,
    "abs": lambda value, _: abs(value if isinstance(value, Fraction) else inexact(value)),
    "floor": lambda value, _: Fraction(math.floor(value)) if isinstance(value, Fraction) else MP.floor(real(value)),
    "ceil": lambda value, _: Fraction(math.ceil(value)) if isinstance(value, Fraction) else MP.ceil(real(value)),
    "transpose": lambda value, _: tuple(zip(*value, strict=True)),
    "degrees": lambda value, sample: inexact(value) * MP.pi / 180,
}
TRIGONOMETRY: dict[str, Callable[[Any], Any]] = {
    "sin": MP.sin, "cos": MP.cos, "tan": MP.tan, "cot": MP.cot, "sec": MP.sec, "csc": MP.csc,
    "arcsin": MP.asin, "arccos": MP.acos, "arctan": MP.atan, "arccot": MP.acot,
    "sinh": MP.sinh, "cosh": MP.cosh, "tanh": MP.tanh,
}  # fmt: skip
POLES = {"tan": MP.cos, "sec": MP.cos, "cot": MP.sin, "csc": MP.sin}
CHOICES: dict[str, Callable[..., Any]] = {"max": max, "min": min}
DIVISORS: dict[str, Callable[..., int]] = {"gcd": math.gcd, "lcm": math.lcm}


def called(tree: Node, sample: SampledValue) -> Value:
    name = tree.name
    values = [valued(part, sample) for part in _listed(tree.parts[0])]
    if name in DIVISORS or name in CHOICES:
        if not all(isinstance(value, Fraction) for value in values):
            raise Unread(f"{name} of what is no fraction")
        if name in CHOICES:
            return CHOICES[name](values)
        return Fraction(DIVISORS[name](*(int(value) for value in values)))
    if len(values) != 1:
        raise Unread(f"{name} of several")
    (value,) = values
    if name in ("log", "lg", "ln"):
        natural = name == "ln" or (name == "log" and sample.natural)
        base = valued(tree.parts[1], sample) if len(tree.parts) == 2 else MP.e if natural else Fraction(10)
        return logarithm(value, base, sample)
    argument = inexact(value)
    if MP.isinf(argument):
        raise Unread(f"{name} of infinity")
    if name == "exp":
        return exponential(argument)
    if name not in TRIGONOMETRY:
        raise Unread(name)
    if argument and MP.mag(argument) > 100:
        raise TooLarge("an angle")
    if name in POLES and is_zero(POLES[name](argument)):
        raise ZeroDivisionError
    return TRIGONOMETRY[name](argument)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > 2 * MOST_BITS:
        raise TooLarge("a number")
    return value
