"""Families that are most easily solved by recursion or by building up a table."""

from __future__ import annotations

from typing import Any

from benchmarks.results.programs.problem import Draw, Problem, family, made


def nested(draw: Draw, depth: int = 3) -> list[Any]:
    return [
        nested(draw, depth - 1) if depth and draw.random() < 0.35 else draw.randint(0, 9)
        for _ in range(draw.randint(1, 4))
    ]


def tree(draw: Draw, depth: int = 3) -> Any:
    if depth == 0 or draw.random() < 0.2:
        return None
    return (draw.randint(0, 9), tree(draw, depth - 1), tree(draw, depth - 1))


@family
def nested_lists(draw: Draw) -> Problem:
    number = draw.randint(2, 6)
    what, leaf, inner, gives = draw.one(
        ("the sum of all numbers, each multiplied by its depth", "item * depth", "sum", "int"),
        ("how many numbers are larger than $number", "int(item > $number)", "sum", "int"),
        ("the sum of the numbers whose depth is even", "item * (depth % 2 == 0)", "sum", "int"),
        (
            "the sum of all numbers, where those with an odd depth are subtracted",
            "item if depth % 2 == 0 else -item",
            "sum",
            "int",
        ),
        (
            "the largest value of number plus $number times depth (0 without numbers)",
            "item + $number * depth",
            "max",
            "int",
        ),
        ("the largest number at a depth of at least 2 (0 if there is none)", "item if depth >= 2 else 0", "max", "int"),
        (
            "how many multiples of $number have a depth of at most 2",
            "int(item % $number == 0 and depth <= 2)",
            "sum",
            "int",
        ),
    )
    combine = "sum(values)" if inner == "sum" else "max(values, default=0)"
    return made(
        draw.one("nested_value", "measure_nested", "deep_fact"),
        {"items": "list"},
        gives,
        "The items are numbers that are not negative, or lists of such items, and so on. A number that stands "
        "directly in the outer list has the depth "
        "1, one in a list inside of it the depth 2, and so on. Return $what.",
        """
        def visit(items, depth):
            values = [visit(item, depth + 1) if isinstance(item, list) else $leaf for item in items]
            return $combine

        return visit(items, 1)
        """,
        draw.some(lambda: (nested(draw),)),
        [([],), ([[], 3],)],
        values=locals(),
    )


@family
def flattened(draw: Draw) -> Problem:
    number = draw.randint(2, 6)
    which, test = draw.one(
        ("", "True"),
        (" Numbers below $number are left out.", "item >= $number"),
        (" Odd numbers are left out.", "item % 2 == 0"),
        (" Numbers above $number are left out.", "item <= $number"),
    )
    order, code = draw.one(("in order", "items"), ("in reversed order", "reversed(items)"))
    often, times = draw.one(
        ("once", "1"),
        ("as often as its depth says (1 in the outer list, 2 in a list inside of it, and so on)", "depth"),
    )
    return made(
        draw.one("flatten_items", "unnest", "spread_out"),
        {"items": "list"},
        "list[int]",
        "The items are numbers, or lists of such items, and so on. Return one list of all numbers $order, each of "
        "them $often.$which",
        """
        def visit(items, depth):
            found = []
            for item in $code:
                if isinstance(item, list):
                    found += visit(item, depth + 1)
                elif $test:
                    found += [item] * $times
            return found

        return visit(items, 1)
        """,
        draw.some(lambda: (nested(draw),)),
        [([],), ([[], [[]]],)],
        values=locals(),
    )


TREES = (
    (
        "the sum of the numbers of its leaves, which are nodes without children",
        "0",
        "node[0] if not node[1] and not node[2] else left + right",
    ),
    (
        "the largest sum of numbers on a way from the top down to a node without children",
        "0",
        "node[0] + max(left, right)",
    ),
    ("the number of its nodes whose number is above $number", "0", "int(node[0] > $number) + left + right"),
    (
        "the number of its nodes that have exactly one child",
        "0",
        "int((node[1] is None) != (node[2] is None)) + left + right",
    ),
    (
        "the sum of its numbers, where everything below a node with an even number is ignored",
        "0",
        "node[0] + (left + right if node[0] % 2 else 0)",
    ),
    (
        "its value, which is $number for None, and for a tuple its number plus the distance of the values of "
        "its two children",
        "$number",
        "node[0] + abs(left - right)",
    ),
    (
        "the list of its numbers, each node after both of its children (left one first)",
        "[]",
        "left + right + [node[0]]",
    ),
    (
        "the list of its numbers, first the right child, then the node, then the left child",
        "[]",
        "right + [node[0]] + left",
    ),
    (
        "the list of its numbers on the way that always takes the left child and, if there is none, the right one",
        "[]",
        "[node[0]] + (left or right)",
    ),
)
"""What is asked of a tree, its value for None, and that for a node."""


@family
def trees(draw: Draw) -> Problem:
    number = draw.randint(3, 6)
    what, empty, value = draw.one(*TREES)
    gives = "list[int]" if empty == "[]" else "int"
    return made(
        draw.one("tree_fact", "measure_tree", "evaluate_tree"),
        {"node": "tuple"},
        gives,
        "A tree is None, or a tuple of a number, its left child and its right child, which are trees. Return, for "
        "the given tree, $what.",
        """
        def visit(node):
            if node is None:
                return $empty
            left, right = visit(node[1]), visit(node[2])
            return $value

        return visit(node)
        """,
        draw.some(lambda: (tree(draw),)),
        [(None,), ((4, None, None),), ((5, (3, None, (8, None, None)), (6, None, None)),)],
        values=locals(),
    )


@family
def ways_to_climb(draw: Draw) -> Problem:
    steps = draw.one([1, 2], [1, 3], [2, 3], [1, 2, 4], [1, 4], [2, 5], [1, 2, 3])
    shown, bad = ", ".join(map(str, steps)), draw.randint(3, 7)
    rule, test = draw.one(
        ("", "False"),
        (
            " Heights that are multiples of $bad must not be stepped on, except for n itself.",
            "height % $bad == 0 and height != n",
        ),
        (
            " Heights that end with the digit $bad must not be stepped on, except for n itself.",
            "height % 10 == $bad and height != n",
        ),
    )
    what, start, add, gives = draw.one(
        (
            "the number of ways to do this (the order of steps matters)",
            "1",
            "sum(ways[height - s] for s in steps if s <= height)",
            "int",
        ),
        (
            "the least number of steps in which this can be done, or -1 if it cannot",
            "0",
            "min((ways[height - s] + 1 for s in steps if s <= height), default=far)",
            "int",
        ),
    )
    none, result = ("0", "ways[n]") if start == "1" else ("far", "ways[n] if ways[n] < far else -1")
    return made(
        draw.one("climb", "reach_height", "staircase"),
        {"n": "int"},
        gives,
        "Somebody climbs from height 0 to height n (not negative) with steps of the heights $shown.$rule Return $what.",
        """
        steps, far, ways = $steps, 10 ** 9, [$start]
        for height in range(1, n + 1):
            ways.append($none if $test else $add)
        return $result
        """,
        [(k,) for k in (7, 10, 5, 12, 9, 6, 14, 8)],
        [(0,), (1,), (3,)],
        values=locals(),
    )


@family
def listed_texts(draw: Draw) -> Problem:
    letters = draw.one("ab", "01", "xyz", "abc")
    first, last = letters[0], letters[-1]
    rule, test = draw.one(
        ("no two neighbouring letters are equal", "all(a != b for a, b in zip(t, t[1:]))"),
        ("'$first' never stands directly before '$last'", "'$first$last' not in t"),
        ("'$first' occurs an even number of times (0 is even)", "t.count('$first') % 2 == 0"),
        ("'$last' occurs at most twice", "t.count('$last') <= 2"),
        ("the first and the last letter are equal", "t[:1] == t[-1:]"),
        ("no letter stands three times in a row", "all(not a == b == c for a, b, c in zip(t, t[1:], t[2:]))"),
    )
    what, result, gives = draw.one(
        ("how many there are", "len(found)", "int"),
        ("the alphabetically last one, or '' if there is none", "max(found, default='')", "str"),
        ("the first four of them in alphabetical order (or fewer)", "sorted(found)[:4]", "list[str]"),
        ("how many of them begin with '$last'", "sum(t.startswith('$last') for t in found)", "int"),
    )
    shown = ", ".join(f"'{c}'" for c in letters)
    return made(
        draw.one("texts_of_length", "allowed_texts", "enumerate_texts"),
        {"n": "int"},
        gives,
        "Consider all texts of length n (at most 7) made of the letters $shown in which $rule. Return $what.",
        """
        texts = ['']
        for _ in range(n):
            texts = [t + c for t in texts for c in '$letters']
        found = [t for t in texts if $test]
        return $result
        """,
        [(k,) for k in (3, 4, 2, 5, 6)],
        [(0,), (1,)],
        values=locals(),
    )


@family
def sums_of_parts(draw: Draw) -> Problem:
    most = draw.randint(2, 4)
    rule, begin = draw.one(
        ("Each number may be used once.", "i + 1"), ("Each number may be used any number of times.", "i")
    )
    limit, test = draw.one(
        ("", "True"),
        (" At most $most numbers may be used.", "count <= $most"),
        (" An odd number of numbers must be used.", "count % 2 == 1"),
    )
    what, result, gives = draw.one(
        ("how many different ways there are (the order does not matter)", "len(found)", "int"),
        ("whether there is a way", "bool(found)", "bool"),
        ("the least number of numbers with which it can be done, or -1", "min(found, default=-1)", "int"),
        ("the largest number of numbers with which it can be done, or -1", "max(found, default=-1)", "int"),
    )
    return made(
        draw.one("reach_total", "sum_to_target", "make_total"),
        {"numbers": "list[int]", "total": "int"},
        gives,
        "A total shall be made as a sum of some of the given numbers, which are positive and different. $rule$limit "
        "The total is positive. Return $what.",
        """
        found = []

        def visit(i, left, count):
            if left == 0 and $test:
                found.append(count)
            for k in range(i, len(numbers)):
                if numbers[k] <= left:
                    visit($begin_at, left - numbers[k], count + 1)

        visit(0, total, 0)
        return $result
        """,
        draw.some(lambda: (draw.sample(range(1, 12), draw.randint(2, 5)), draw.randint(4, 18))),
        [([], 3), ([5], 5)],
        values=locals() | {"begin_at": begin.replace("i", "k")},
    )
