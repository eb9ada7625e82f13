r"""Sets of real numbers: intervals, points, and what inequalities, `∪`, `∩` and `∖` make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddock.grading.forms import Equation, Form, Group, Inequality, Many, Scalar, Sets, Words, is_name
from paddock.grading.limits import Unread
from paddock.grading.values import MP, SampledValue, real, same, valued

End = tuple[Any, bool]
"""A bound and whether the set contains it."""


@dataclass(frozen=True)
class Piece:
    low: Any
    closed_low: bool
    high: Any
    closed_high: bool

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Piece):
            return NotImplemented
        return (
            (self.closed_low, self.closed_high) == (other.closed_low, other.closed_high)
            and same(self.low, other.low) and same(self.high, other.high)
        )  # fmt: skip


@dataclass(frozen=True)
class Region:
    """Disjoint pieces from left to right, and the variable that the text names."""

    pieces: tuple[Piece, ...]
    name: str = ""


LINE = Piece(-MP.inf, False, MP.inf, False)


def region(read: Form) -> Region | None:
    """Returns the region; None if this is not a set of real numbers with known bounds."""
    try:
        return _region(read)
    except (Unread, ZeroDivisionError):
        return None


def _region(read: Form) -> Region:
    if isinstance(read, Words) and read.text == "ℝ":
        return Region((LINE,))
    if isinstance(read, Group) and len(read.members) == 2 and read.opening in "([" and read.closing in ")]":
        low, high = map(_bound, read.members)
        return Region(_united([Piece(low, read.opening == "[", high, read.closing == "]")]))
    if isinstance(read, Inequality):
        return _solved(read)
    if isinstance(read, Equation) and is_name(read.left) and len(read.rights) == 1:
        inside = _region(read.rights[0]) if read.sign == "∈" else Region((_point(read.rights[0]),))
        return Region(inside.pieces, read.left.text if isinstance(read.left, Scalar) else "")
    if isinstance(read, Many):
        return _many(read)
    if isinstance(read, Sets):
        return _combined(read)
    raise Unread("not a set of reals")


def _bound(read: Form) -> Any:
    if not isinstance(read, Scalar) or read.tree is None:
        raise Unread("not a bound")
    return real(valued(read.tree, SampledValue(None)))


def _point(read: Form) -> Piece:
    value = _bound(read)
    return Piece(value, True, value, True)


def _solved(read: Inequality) -> Region:
    """`x > 3`, `3 < x`, `1 < x ≤ 2`, `x ≠ 3`: the variable alone on its side."""
    names = [place for place, member in enumerate(read.members) if isinstance(member, Scalar) and is_name(member)]
    if len(names) != 1 or len(read.members) > 3 or (len(read.members) == 3 and names != [1]):
        raise Unread("not solved")
    name = read.members[names[0]].text.replace(" ", "")  # type: ignore[union-attr]
    pieces: tuple[Piece, ...] = (LINE,)
    for place, sign in enumerate(read.signs):
        left, right = read.members[place], read.members[place + 1]
        bound = _bound(right if names[0] == place else left)
        if sign == "≠":
            half: tuple[Piece, ...] = (Piece(-MP.inf, False, bound, False), Piece(bound, False, MP.inf, False))
        else:
            below = (sign in "<≤") == (names[0] == place)  # the variable is below the bound
            closed = sign in "≤≥"
            half = (Piece(-MP.inf, False, bound, closed) if below else Piece(bound, closed, MP.inf, False),)
        pieces = _shared(pieces, half)
    return Region(pieces, name)


def _many(read: Many) -> Region:
    members = [
        _region(member) if not isinstance(member, Scalar) else Region((_point(member),)) for member in read.members
    ]
    names = {member.name for member in members if member.name}
    if len(names) > 1 or not members:
        raise Unread("several variables")
    if read.joint == "or" or not any(isinstance(member, Inequality) for member in read.members):
        return Region(_united([piece for member in members for piece in member.pieces]), *names)
    pieces = members[0].pieces
    every = all(isinstance(m, Inequality) and m.signs == ("≠",) for m in read.members)
    for member in members[1:]:
        pieces = _shared(pieces, member.pieces)
    if not pieces and not every:  # `x < 1, x > 3` lists the parts of a union
        return Region(_united([piece for member in members for piece in member.pieces]), *names)
    return Region(pieces, *names)


def _combined(read: Sets) -> Region:
    first, *others = map(_region, read.members)
    pieces = first.pieces
    for sign, other in zip(read.signs, others, strict=True):
        if sign == "∪":
            pieces = _united([*pieces, *other.pieces])
        else:
            pieces = _shared(pieces, other.pieces if sign == "∩" else _complement(other.pieces))
    return Region(pieces, first.name)


def _united(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Sorts the pieces, joins those that touch, and drops empty ones."""
    kept = [p for p in pieces if p.low < p.high or (same(p.low, p.high) and p.closed_low and p.closed_high)]
    kept.sort(key=lambda piece: (piece.low, not piece.closed_low))
    found: list[Piece] = []
    for piece in kept:
        last = found[-1] if found else None
        touches = last and (
            piece.low < last.high or (same(piece.low, last.high) and (piece.closed_low or last.closed_high))
        )
        if last is None or not touches:
            found.append(piece)
        elif same(piece.high, last.high):
            found[-1] = Piece(last.low, last.closed_low, last.high, last.closed_high or piece.closed_high)
        elif piece.high > last.high:
            found[-1] = Piece(last.low, last.closed_low, piece.high, piece.closed_high)
    return tuple(found)


def _shared(ones: tuple[Piece, ...], others: tuple[Piece, ...]) -> tuple[Piece, ...]:
    found = []
    for one in ones:
        for other in others:
            if same(one.low, other.low):
                low: End = (one.low, one.closed_low and other.closed_low)
            else:
                low = max((one.low, one.closed_low), (other.low, other.closed_low), key=lambda end: end[0])
            if same(one.high, other.high):
                high: End = (one.high, one.closed_high and other.closed_high)
            else:
                high = min((one.high, one.closed_high), (other.high, other.closed_high), key=lambda end: end[0])
            found.append(Piece(*low, *high))
    return _united(found)


def _complement(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    found, low, closed = [], -MP.inf, False
    for piece in _united(list(pieces)):
        found.append(Piece(low, closed, piece.low, not piece.closed_low))
        low, closed = piece.high, not piece.closed_high
    return _united([*found, Piece(low, closed, MP.inf, False)])
