"""Decides whether an answer is the truth. docs/en/rewards.md has the rules, tests/rewards/answers.tsv the cases."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from paddock.grading import library, regions
from paddock.grading.forms import (
    THOUSANDS,
    Equation,
    Form,
    Group,
    Inequality,
    Many,
    Numeral,
    Option,
    Ratio,
    Residue,
    Scalar,
    Sets,
    Words,
    form,
    is_name,
    like_option,
    names_option,
    options,
)
from paddock.grading.limits import LONGEST, SECONDS, TooLarge, TooLong, Unread, cpu_seconds
from paddock.grading.notation import canonical
from paddock.grading.reader import Node
from paddock.grading.values import SampledValue, equal, letters_of, proportional, rounds_to, valued

logger = logging.getLogger(__name__)

SIGNIFICANT = 6  # digits that a decimal needs to stand for a number with endlessly many: 0.333333 is 1/3, 0.33 is not
BLANK = re.compile(r"(?<!\d) +| +(?!\d)")  # not the one in `1 2`
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}
ROUND = {"(": "(", "⟨": "(", "[": "[", ")": ")", "⟩": ")", "]": "]"}


@dataclass(frozen=True)
class Verdict:
    equal: bool
    undecided: bool = False
    """The comparison was given up: a number was too large to compute, or the CPU time was spent. `equal` is False."""


@lru_cache(maxsize=16_384)
def compared(answer: str, truth: str) -> Verdict:
    """The verdict on this answer; the most recent ones are remembered."""
    if len(answer) > max(LONGEST, 2 * len(truth)):
        return Verdict(False)
    try:
        with cpu_seconds(SECONDS):
            return Verdict(_equal(canonical(answer), canonical(truth)))
    except (TooLarge, TooLong):
        return Verdict(False, undecided=True)
    except Exception:  # a mistake in here, or in SymPy: no answer may end a run
        logger.debug("no verdict on %.100r for %.100r", answer, truth, exc_info=True)
        return Verdict(False, undecided=True)


def _equal(answer: str, truth: str) -> bool:
    if BLANK.sub("", answer) == BLANK.sub("", truth):
        return bool(answer)
    if not answer or not truth:
        return False
    try:
        expected = form(truth)
        if names_option(expected) and not options(answer) <= options(truth):
            return False  # a hedge: it names another option, wherever and however
        given = form(answer)
        if isinstance(expected, Many) != isinstance(given, Many):  # `100,200,300` may be a number or three
            expected, given = _as_list(truth, expected), _as_list(answer, given)
        return same(expected, given)
    except (Unread, ZeroDivisionError, ValueError):
        return library.equal(truth, answer)


def _as_list(text: str, read: Form) -> Form:
    match = THOUSANDS.fullmatch(text)
    return Many(tuple(map(form, text.split(",")))) if match and not match[3] else read


def same(truth: Form, answer: Form) -> bool:
    """Compares two forms; each pair of kinds has its rule."""
    if isinstance(truth, Scalar) and isinstance(answer, Scalar):
        return _same_scalar(truth, answer)
    for kinds, rule in RULES:
        if isinstance(truth, kinds) or isinstance(answer, kinds):
            return rule(truth, answer)
    return truth == answer and isinstance(truth, Words | Numeral)


def _same_choice(truth: Form, answer: Form) -> bool:
    """`(B)`, `B` and `(B) 12` are one option. The content counts if one side has no letter, and an answer's content
    never says the letter."""
    if isinstance(truth, Option) and isinstance(answer, Option):
        if truth.letter.upper() != answer.letter.upper():
            return False
        return truth.content is None or answer.content is None or same(truth.content, answer.content)
    choice, other = (truth, answer) if isinstance(truth, Option) else (answer, truth)
    assert isinstance(choice, Option)
    if same(Scalar(choice.letter), other):
        return True
    if choice is answer and isinstance(other, Scalar) and like_option(other.text.strip("{} "), choice.letter):
        return False  # `(a) x=b` says `a`
    return choice.content is not None and (
        same(choice.content, other) if choice is truth else same(other, choice.content)
    )


def _same_equation(truth: Form, answer: Form) -> bool:
    if isinstance(truth, Equation) and isinstance(answer, Equation):
        if truth.left is not None and answer.left is not None:
            return _same_equations(truth, answer)
        if answer.left is None:
            return _same_equation(truth, answer.rights[-1]) and all(same(answer.rights[-1], x) for x in answer.rights)
        return _same_equation(truth.rights[-1], answer)
    if isinstance(answer, Equation):  # every part of a chain must be right
        return _says_its_right_side(answer) and all(same(truth, right) for right in answer.rights)
    assert isinstance(truth, Equation)
    if not is_name(truth.left):  # `x^2 + y^2 = 4` is not `4`
        return False
    return same(truth.rights[-1], answer)


def _says_its_right_side(answer: Equation) -> bool:
    """`x = 5` says `5`, and `x + y = 7` says `7`; but `x + y - 7 = 0` does not say `0`, nor `2x = 10` `10`."""
    if is_name(answer.left):
        return True
    return isinstance(answer.left, Scalar) and answer.left.tree is not None and not _has_numbers(answer.left.tree)


def _has_numbers(tree: Node) -> bool:
    return tree.value is not None or any(map(_has_numbers, tree.parts))


def _same_equations(truth: Equation, answer: Equation) -> bool:
    if truth.sign != answer.sign:
        return same(truth.rights[-1], answer.rights[-1]) and truth.left == answer.left
    answer = _with_argument_of(truth, answer)
    named = is_name(truth.left), is_name(answer.left)
    if all(named) and _same_name(truth.left, answer.left):
        return all(same(truth.rights[-1], right) for right in answer.rights)
    sides = _difference(truth), _difference(answer)
    if None in sides or truth.sign != "=" or (named[0] and not letters_of(_tree(truth.rights[-1]))):
        return False  # `2x = 10` does not solve what `x = 5` solves
    return letters_of(sides[0]) == letters_of(sides[1]) and proportional(sides[0], sides[1], positive=False)  # type: ignore[arg-type]


def _with_argument_of(truth: Equation, answer: Equation) -> Equation:
    """`f(n) = 2n` with the letter of `f(x) = 2x`, for a function does not depend on the name of its argument."""
    right = answer.rights[0]
    if not (isinstance(truth.left, Scalar) and isinstance(answer.left, Scalar) and isinstance(right, Scalar)):
        return answer
    ours, theirs = truth.left.tree, answer.left.tree
    if ours is None or theirs is None or len(answer.rights) > 1 or (ours.kind, ours.name) != (theirs.kind, theirs.name):
        return answer
    letters = [tree.parts[0].name for tree in (ours, theirs) if tree.kind == "apply" and tree.parts[0].kind == "letter"]
    if len(letters) != 2 or letters[0] == letters[1] or right.tree is None or letters[0] in letters_of(right.tree):
        return answer
    pattern = rf"(?<![\\A-Za-z]){re.escape(letters[1])}(?![A-Za-z])"
    return Equation(truth.left, (Scalar(re.sub(pattern, letters[0], right.text), right.unit),))


def _same_name(one: Form | None, other: Form | None) -> bool:
    if one == other or one is None or other is None:
        return True
    if not isinstance(one, Scalar) or not isinstance(other, Scalar):
        return False
    if one.tree and other.tree and {one.tree.kind, other.tree.kind} == {"apply", "letter"}:  # `f` and `f(x)`
        return one.tree.name == other.tree.name
    return BLANK.sub("", one.text) == BLANK.sub("", other.text)


def _difference(equation: Equation) -> Node | None:
    if len(equation.rights) != 1 or not isinstance(equation.left, Scalar) or not isinstance(equation.rights[0], Scalar):
        return None
    left, right = equation.left.tree, equation.rights[0].tree
    return Node("+", (left, Node("neg", (right,)))) if left is not None and right is not None else None


def _tree(read: Form) -> Node:
    if not isinstance(read, Scalar) or read.tree is None:
        raise Unread("not an expression")
    return read.tree


def _same_region(truth: Form, answer: Form) -> bool:
    """Compares two regions as sets of real numbers, if both can be solved so; else inequality by inequality."""
    expected, given = regions.region(truth), regions.region(answer)
    if expected is not None and given is not None:
        names = {name for name in (expected.name, given.name) if name}
        return len(names) < 2 and expected.pieces == given.pieces
    if expected is not None or given is not None:
        return False  # `2x > 6` does not solve what `x > 3` solves
    if isinstance(truth, Inequality) and isinstance(answer, Inequality):
        return _same_inequality(truth, answer)
    if isinstance(truth, Many) and isinstance(answer, Many):
        return _same_members(truth, answer)
    if isinstance(truth, Sets) and isinstance(answer, Sets):
        return truth.signs == answer.signs and _in_order(truth.members, answer.members)
    return False


def _same_inequality(truth: Inequality, answer: Inequality) -> bool:
    if len(truth.members) != len(answer.members):
        return False
    turned = Inequality(answer.members[::-1], tuple(FLIPPED[sign] for sign in reversed(answer.signs)))
    for given in (answer, turned):
        if given.signs == truth.signs and (
            _in_order(truth.members, given.members) or _same_sides(truth.members, given.members, truth.signs)
        ):
            return True
    return False


def _same_sides(truth: tuple[Form, ...], answer: tuple[Form, ...], signs: tuple[str, ...]) -> bool:
    if len(truth) != 2:
        return False
    sides = [Node("+", (_tree(left), Node("neg", (_tree(right),)))) for left, right in (truth, answer)]
    return letters_of(sides[0]) == letters_of(sides[1]) and proportional(sides[0], sides[1], positive=signs[0] != "≠")


def _same_many(truth: Form, answer: Form) -> bool:
    for each in (truth, answer):
        if isinstance(each, Many) and each.members and all(isinstance(part, Inequality) for part in each.members):
            return _same_region(truth, answer)
    if isinstance(truth, Many) and isinstance(answer, Many):
        bare = _bare_assignments(truth), _bare_assignments(answer)
        if (bare[0] is None) == (bare[1] is None):
            return _same_members(truth, answer)
        expected, given = bare[0] or truth, bare[1] or answer  # only one side says what its members are assigned to
        if _several_names(truth) or _several_names(answer):  # `x = 1, y = 2` is not `2, 1`
            return _in_order(expected.members, given.members)
        return _same_members(expected, given)
    many, other = (truth, answer) if isinstance(truth, Many) else (answer, truth)
    assert isinstance(many, Many)
    if len(many.members) == 1:
        return same(many.members[0], other)
    in_order = not many.braces and many.joint in (",", "and")
    if isinstance(other, Group) and in_order and len(many.members) == len(other.members):
        values = _bare_assignments(many) or many
        return (ROUND[other.opening], ROUND[other.closing]) == ("(", ")") and _in_order(other.members, values.members)
    if len(many.members) > 1 and not many.braces:  # `±0`, `2, 2`
        return all(same(member, other) for member in many.members) and not isinstance(other, Words)
    return False


def _several_names(many: Many) -> bool:
    """`x = 1, y = 2`; but `x_1 = 1, x_2 = 2` are values of one unknown."""
    lefts = [
        member.left.text.strip()
        for member in many.members
        if isinstance(member, Equation) and isinstance(member.left, Scalar)
    ]
    return len({left.partition("_")[0] for left in lefts}) > 1


def _bare_assignments(many: Many) -> Many | None:
    """`y = 2, x = 1` -> `1, 2`, and `x = 1 or x = 2` -> `1, 2`; None if a member is not an assignment."""
    pairs = []
    for member in many.members:
        if not isinstance(member, Equation) or not isinstance(member.left, Scalar) or not is_name(member.left):
            return None
        pairs.append((member.left.text.replace(" ", ""), member.rights[-1]))
    if len({name for name, _ in pairs}) == len(pairs):
        pairs.sort(key=lambda pair: pair[0])
    return Many(tuple(value for _, value in pairs), braces=many.braces, joint=many.joint)


def _same_members(truth: Many, answer: Many) -> bool:
    """True if members agree one to one, in any order; a member that is said twice counts once."""
    expected, given = _distinct(truth.members), _distinct(answer.members)
    if len(expected) != len(given):
        return False
    for member in expected:
        match = next((place for place, other in enumerate(given) if _quietly_same(member, other)), None)
        if match is None:
            return False
        del given[match]
    return True


def _distinct(members: tuple[Form, ...]) -> list[Form]:
    found: list[Form] = []
    for member in members:
        if not any(_quietly_same(member, other) for other in found):
            found.append(member)
    return found


def _quietly_same(one: Form, other: Form) -> bool:
    try:
        return same(one, other)
    except (Unread, ZeroDivisionError, ValueError):
        return one == other


def _in_order(truth: tuple[Form, ...], answer: tuple[Form, ...]) -> bool:
    return len(truth) == len(answer) and all(map(same, truth, answer))


def _same_group(truth: Form, answer: Form) -> bool:
    if isinstance(truth, Group) and isinstance(answer, Group):
        ends = [(ROUND[each.opening], ROUND[each.closing]) for each in (truth, answer)]
        return (ends[0] == ends[1] or len(truth.members) > 2) and _in_order(truth.members, answer.members)
    group, other = (truth, answer) if isinstance(truth, Group) else (answer, truth)
    assert isinstance(group, Group)
    if isinstance(other, Words):
        found = regions.region(group), regions.region(other)
        return None not in found and found[0] == found[1]
    if isinstance(other, Scalar) and other.tree is not None and other.tree.kind == "matrix":  # a column is a point
        if (ROUND[group.opening], ROUND[group.closing]) != ("(", ")"):
            return False
        rows = [row.parts for row in other.tree.parts]
        trees = [member.tree for member in group.members if isinstance(member, Scalar)]
        return (
            {len(row) for row in rows} == {1}
            and len(trees) == len(rows) == len(group.members)
            and all(tree is not None and equal(tree, row[0]) for tree, row in zip(trees, rows, strict=True))
        )
    return False


def _same_ratio(truth: Form, answer: Form) -> bool:
    """`2:4` is `1:2` and `1/2`; three parts are proportional."""
    if isinstance(truth, Ratio) and isinstance(answer, Ratio):
        one, other = ([_tree(member) for member in each.members] for each in (truth, answer))
        return len(one) == len(other) and all(
            equal(Node("*", (one[0], other[place])), Node("*", (one[place], other[0]))) for place in range(1, len(one))
        )
    ratio, other_form = (truth, answer) if isinstance(truth, Ratio) else (answer, truth)
    assert isinstance(ratio, Ratio)
    if len(ratio.members) != 2 or not isinstance(other_form, Scalar):
        return False
    return equal(Node("/", (_tree(ratio.members[0]), _tree(ratio.members[1]))), _tree(other_form))


def _same_residue(truth: Form, answer: Form) -> bool:
    r"""`3 \pmod 7` is `10 \pmod 7`; without a modulus the number itself must be there."""
    if isinstance(truth, Residue) and isinstance(answer, Residue):
        if not same(truth.modulus, answer.modulus):
            return False
        values = [valued(_tree(each), SampledValue(None)) for each in (truth.value, answer.value, truth.modulus)]
        if not all(isinstance(value, Fraction) for value in values) or not values[2]:
            return same(truth.value, answer.value)
        return (values[0] - values[1]) % values[2] == 0
    if isinstance(truth, Residue):
        return same(truth.value, answer)
    assert isinstance(answer, Residue)
    return same(truth, answer.value)


def _same_scalar(truth: Scalar, answer: Scalar) -> bool:
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    if truth.tree is None or answer.tree is None:
        if BLANK.sub("", truth.text) == BLANK.sub("", answer.text):
            return True
        return library.equal(truth.text, answer.text)
    if equal(truth.tree, answer.tree):
        return True
    if letters_of(truth.tree) or letters_of(answer.tree):
        return False
    return rounds_to(answer.tree, truth.tree, SIGNIFICANT) or rounds_to(truth.tree, answer.tree, SIGNIFICANT)


RULES: tuple[tuple[Any, Callable[[Form, Form], bool]], ...] = (
    (Option, _same_choice),
    (Equation, _same_equation),
    ((Inequality, Sets), _same_region),
    (Many, _same_many),
    (Group, _same_group),
    (Ratio, _same_ratio),
    (Residue, _same_residue),
)
"""The rule for two forms if either is of this kind; the first that fits."""
