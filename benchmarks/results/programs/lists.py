"""Families about lists of numbers."""

from __future__ import annotations

from benchmarks.results.programs.problem import Draw, Problem, family, made

NUMBERS = {"numbers": "list[int]"}


@family
def windows(draw: Draw) -> Problem:
    size = draw.randint(2, 4)
    what, value = draw.one(
        ("the difference of its largest and its smallest number", "max(w) - min(w)"),
        ("the sum of its numbers without the largest one", "sum(w) - max(w)"),
        ("its first number times its last one", "w[0] * w[-1]"),
        ("how many different numbers it has", "len(set(w))"),
        ("its last number minus its first one", "w[-1] - w[0]"),
    )
    wanted, result, gives, empty = draw.one(
        ("the list of values", "values", "list[int]", "[]"),
        (
            "the position at which the window with the largest value begins (the first such window)",
            "values.index(max(values)) if values else -1",
            "int",
            "-1",
        ),
        ("the largest value minus the smallest", "max(values) - min(values) if values else 0", "int", "0"),
    )
    return made(
        draw.one("window_values", "scan_windows", "slide_over"),
        NUMBERS,
        gives,
        "A window is $size neighbouring numbers of the list, and its value is $what. Return $wanted. If the list has "
        "fewer than $size numbers, return $empty.",
        """
        windows = [numbers[i:i + $size] for i in range(len(numbers) - $size + 1)]
        values = [$value for w in windows]
        return $result
        """,
        draw.some(lambda: (draw.numbers(0, 12, 4, 9),)),
        [([],), ([4],)],
        values=locals(),
    )


@family
def chunks(draw: Draw) -> Problem:
    size = draw.randint(2, 4)
    rest, cut = draw.one(
        ("a last chunk with fewer numbers is ignored", f" if len(numbers) - i >= {size}"),
        ("the last chunk may have fewer numbers", ""),
    )
    what, value = draw.one(
        ("its largest number", "max(c)"),
        ("its sum", "sum(c)"),
        ("its first number plus its last one", "c[0] + c[-1]"),
        ("the number of its even numbers", "sum(n % 2 == 0 for n in c)"),
        ("the sum of its odd numbers", "sum(n for n in c if n % 2)"),
    )
    return made(
        draw.one("summarize_chunks", "chunk_values", "by_chunks"),
        NUMBERS,
        "list[int]",
        "Cut the list into chunks of $size numbers, in order; $rest. Return a list with one entry per chunk: $what.",
        """
        chunks = [numbers[i:i + $size] for i in range(0, len(numbers), $size)$cut]
        return [$value for c in chunks]
        """,
        draw.some(lambda: (draw.numbers(-9, 20, 4, 11),)),
        [([],), ([3],)],
        values=locals(),
    )


@family
def streaks(draw: Draw) -> Problem:
    bound = draw.randint(1, 4)
    which, holds = draw.one(
        ("each number is larger than the one before", "b > a"),
        (f"neighbours differ by at most {bound}", f"abs(a - b) <= {bound}"),
        ("even and odd numbers alternate", "(a + b) % 2 == 1"),
        (f"each number is at least {bound} smaller than the one before", f"b <= a - {bound}"),
        (f"the sum of two neighbours is a multiple of {bound + 1}", f"(a + b) % {bound + 1} == 0"),
    )
    what, result, gives = draw.one(
        ("its length", "len(best)", "int"),
        ("the streak itself", "best", "list[int]"),
        ("the sum of its numbers", "sum(best)", "int"),
    )
    tie, compare = draw.one(("first", ">"), ("last", ">="))
    return made(
        draw.one("longest_streak", "best_streak", "longest_part"),
        NUMBERS,
        gives,
        "A streak is a part of the list (neighbouring numbers) in which $which; a single number is a streak too. Find "
        "the longest streak, of equally long ones the $tie, and return $what. The list is not empty.",
        """
        best, current = [], []
        for b in numbers:
            if current:
                a = current[-1]
                current = current + [b] if $holds else [b]
            else:
                current = [b]
            if len(current) $compare len(best):
                best = current
        return $result
        """,
        draw.some(lambda: (draw.numbers(0, 12, 4, 10),)),
        [([7],)],
        values=locals(),
    )


@family
def segments(draw: Draw) -> Problem:
    number = draw.randint(3, 7)
    mark, test = draw.one(
        ("negative number", "n < 0"),
        (f"multiple of {number}", f"n % {number} == 0"),
        (f"number above {number + 6}", f"n > {number + 6}"),
        ("number that ends with the digit 0 or 5", "n % 5 == 0"),
    )
    what, result, gives = draw.one(
        ("the sums of the parts", "[sum(part) for part in parts]", "list[int]"),
        ("the parts with at least two numbers", "[part for part in parts if len(part) >= 2]", "list[list[int]]"),
        ("the length of the longest part (0 if there is none)", "max(map(len, parts), default=0)", "int"),
        ("the first numbers of the parts", "[part[0] for part in parts]", "list[int]"),
    )
    return made(
        draw.one("split_at_marks", "part_list", "cut_at"),
        NUMBERS,
        gives,
        "Every $mark in the list separates what stands before it from what stands after it, and belongs to no part. "
        "Empty parts do not count. Return $what.",
        """
        parts = [[]]
        for n in numbers:
            if $test:
                parts.append([])
            else:
                parts[-1].append(n)
        parts = [part for part in parts if part]
        return $result
        """,
        draw.some(lambda: (draw.numbers(-6, 18, 6, 12),)),
        [([],)],
        values=locals(),
    )


@family
def folded(draw: Draw) -> Problem:
    how, value = draw.one(
        ("the sum of the two", "a + b"),
        ("the larger one minus the smaller one", "abs(a - b)"),
        ("the larger of the two", "max(a, b)"),
        ("the first minus the second", "a - b"),
        ("the product of the two", "a * b"),
    )
    middle, code = draw.one(
        ("is appended as it is", "numbers[half]"),
        ("is appended doubled", "2 * numbers[half]"),
        ("is left out", ""),
        ("is appended with the other sign", "-numbers[half]"),
    )
    last = f"if len(numbers) % 2:\n    found.append({code})" if code else "# the middle is left out"
    return made(
        draw.one("fold_list", "pair_ends", "combine_ends"),
        NUMBERS,
        "list[int]",
        "Fold the list in the middle: combine its first number with its last, its second with its second to last, and "
        "so on, each pair to $how. If the number of entries is odd, the one in the middle $middle. Return the "
        "combined numbers.",
        "half = len(numbers) // 2\nfound = []\nfor a, b in zip(numbers[:half], numbers[::-1]):\n    "
        "found.append($value)\n" + last + "\nreturn found",
        draw.some(lambda: (draw.numbers(-5, 15, 3, 8),)),
        [([],), ([6],)],
        values=locals(),
    )


@family
def peaks(draw: Draw) -> Problem:
    kind, side, gap = *draw.one(("peak", "larger"), ("valley", "smaller")), draw.randint(1, 3)
    ends, code = draw.one(
        ("The first and the last number are never counted.", False),
        ("The first and the last number have one neighbour only, which must fulfil this.", True),
    )
    what, result, gives = draw.one(
        ("the list of their positions", "found", "list[int]"),
        ("the sum of their values", "sum(numbers[i] for i in found)", "int"),
        ("their values in ascending order", "sorted(numbers[i] for i in found)", "list[int]"),
    )
    span = "range(len(numbers))" if code else "range(1, len(numbers) - 1)"
    sign = "numbers[i] - n" if kind == "peak" else "n - numbers[i]"
    return made(
        f"find_{kind}s",
        NUMBERS,
        gives,
        "A number is a $kind if it is $side than each of its neighbours by at least $gap. $ends A list with a single "
        "number has no ${kind}. Of all ${kind}s return $what.",
        """
        found = []
        for i in $span:
            around = numbers[max(0, i - 1):i] + numbers[i + 1:i + 2]
            if around and all($sign >= $gap for n in around):
                found.append(i)
        return $result
        """,
        draw.some(lambda: (draw.numbers(0, 9, 5, 10),)),
        [([],), ([5],)],
        values=locals(),
    )


@family
def thinned(draw: Draw) -> Problem:
    gap = draw.randint(2, 6)
    order, code, back = draw.one(
        ("first to last", "numbers", "kept"), ("last to first", "reversed(numbers)", "kept[::-1]")
    )
    rule, test = draw.one(
        ("differs from the number that was kept last by at least", f"abs(n - kept[-1]) >= {gap}"),
        ("is larger than the number that was kept last by at least", f"n - kept[-1] >= {gap}"),
        ("has with the number that was kept last a sum of at least", f"n + kept[-1] >= {gap}"),
    )
    what, result, gives = draw.one(
        ("the numbers that were kept, in their original order", back, "list[int]"),
        ("how many numbers were left out", "len(numbers) - len(kept)", "int"),
    )
    return made(
        draw.one("thin_out", "keep_apart", "drop_close"),
        NUMBERS,
        gives,
        "Go through the list from $order. The number met first is kept; of the others one is kept if it $rule $gap. "
        "Return $what.",
        """
        kept = []
        for n in $code:
            if not kept or $test:
                kept.append(n)
        return $result
        """,
        draw.some(lambda: (draw.numbers(-4, 15, 5, 10),)),
        [([],), ([5],)],
        values=locals(),
    )


@family
def buckets(draw: Draw) -> Problem:
    width, count = draw.one(5, 10, 20, 25), draw.randint(3, 5)
    outside, code = draw.one(
        ("belong to the last bucket", "counts[min(n // $width, $count - 1)] += $value"),
        ("are ignored", "if n < $width * $count:\n        counts[n // $width] += $value"),
    )
    what, value = draw.one(("how many numbers it has", "1"), ("the sum of its numbers", "n"))
    last = width - 1
    return made(
        draw.one("fill_buckets", "count_by_range", "bucket_totals"),
        NUMBERS,
        "list[int]",
        "There are $count buckets: the first takes numbers from 0 to $last, each further one the next $width "
        "numbers. Numbers beyond the last bucket $outside. Numbers are not negative. Return a list with one entry per "
        "bucket: $what.",
        "counts = [0] * $count\nfor n in numbers:\n    " + code + "\nreturn counts",
        draw.some(lambda: (draw.numbers(0, width * count + width, 4, 9),)),
        [([],)],
        values=locals(),
    )


@family
def frequent(draw: Draw) -> Problem:
    least = draw.randint(2, 3)
    tie, key = draw.one(
        ("the smallest", "(-numbers.count(n), n)"),
        ("the largest", "(-numbers.count(n), -n)"),
        ("the one that occurs first", "(-numbers.count(n), numbers.index(n))"),
    )
    none, code = draw.one(("-1", "-1"), ("None", "None"), ("0", "0"))
    seldom, sign = draw.one(("most", ""), ("least", "+"))
    key = key.replace("-numbers.count", "numbers.count") if sign else key
    return made(
        draw.one("pick_by_count", "chosen_by_frequency", "settle_vote"),
        NUMBERS,
        "int",
        "Among the numbers that occur at least $least times in the list, return the one that occurs $seldom often; of "
        "several such numbers return $tie. If no number occurs $least times, return $none.",
        """
        found = [n for n in set(numbers) if numbers.count(n) >= $least]
        return min(found, key=lambda n: $key) if found else $code
        """,
        draw.some(lambda: (draw.numbers(1, 5, 5, 12),)),
        [([],), ([1, 2, 3],)],
        values=locals(),
    )


@family
def resetting_total(draw: Draw) -> Problem:
    limit = draw.randint(6, 20)
    when, test = draw.one(
        ("exceeds", "total > $limit"),
        ("is a multiple of", "total % $limit == 0"),
        ("reaches or exceeds", "total >= $limit"),
    )
    action, code = draw.one(
        ("it is set to 0", "total = 0"),
        (f"{limit} is subtracted from it once", f"total -= {limit}"),
        ("it is halved, rounded down", "total //= 2"),
    )
    what, result, gives = draw.one(
        ("the list of totals after each number", "history", "list[int]"),
        ("how often that happened", "count", "int"),
        (
            "the largest total that stood after a number was dealt with (0 for an empty list)",
            "max(history, default=0)",
            "int",
        ),
    )
    return made(
        draw.one("total_with_reset", "run_counter", "overflowing_total"),
        NUMBERS,
        gives,
        "Add up the numbers from left to right, beginning at 0. Whenever the total $when $limit after a number was "
        "added, $action. "
        "All numbers are positive. Return $what.",
        """
        total, count, history = 0, 0, []
        for n in numbers:
            total += n
            if $test:
                $code
                count += 1
            history.append(total)
        return $result
        """,
        draw.some(lambda: (draw.numbers(1, 12, 4, 10),)),
        [([],)],
        values=locals(),
    )


@family
def cyclic_weights(draw: Draw) -> Problem:
    weights = draw.one([1, 3], [2, 1, 4], [1, -1], [5, 2], [1, 2, 3], [3, 0, 1], [1, 1, -2], [7, 3, 1])
    change, code = draw.one(
        ("", "total"), (" modulo 10", "total % 10"), (" modulo 7", "total % 7"), (" modulo 11", "total % 11")
    )
    side, order = draw.one(("left", "numbers"), ("right", "numbers[::-1]"))
    shown = ", ".join(map(str, weights))
    return made(
        draw.one("weighted_total", "check_number", "weigh_digits"),
        NUMBERS,
        "int",
        "Multiply the numbers, counted from the $side, by the weights $shown, which start over when they are used up. "
        "Return the sum of the products$change.",
        """
        weights = $weights
        total = sum(n * weights[i % len(weights)] for i, n in enumerate($order))
        return $code
        """,
        draw.some(lambda: (draw.numbers(0, 9, 3, 9),)),
        [([],)],
        values=locals(),
    )


@family
def sorted_by_rule(draw: Draw) -> Problem:
    number = draw.randint(3, 9)
    rule, key = draw.one(
        ("their last digit", "abs(n) % 10"),
        (f"their remainder when divided by {number}", f"n % {number}"),
        (f"their distance from {number * 4}", f"abs(n - {number * 4})"),
        ("how many digits they have", "len(str(abs(n)))"),
        ("their largest digit", "max(str(abs(n)))"),
        (f"how often the digit {number} occurs in them", f"str(abs(n)).count('{number}')"),
    )
    tie, second = draw.one(("the smaller number comes first", "n"), ("the larger number comes first", "-n"))
    which, part = draw.one(
        ("", ""), (" Return only the first three.", "[:3]"), (" Return them in reversed order.", "[::-1]")
    )
    return made(
        draw.one("arrange_numbers", "order_by_rule", "line_up"),
        NUMBERS,
        "list[int]",
        "Sort the numbers by $rule, the lowest first; if this is equal, $tie. Numbers are not negative.$which",
        "return sorted(numbers, key=lambda n: ($key, $second))$part",
        draw.some(lambda: (draw.numbers(0, 130, 4, 9),)),
        [([],), ([5],)],
        values=locals(),
    )


@family
def by_neighbours(draw: Draw) -> Problem:
    rule, test = draw.one(
        ("larger than the average of its two neighbours", "2 * b > a + c"),
        ("between its two neighbours in size (strictly)", "min(a, c) < b < max(a, c)"),
        ("a divisor of the sum of its two neighbours", "(a + c) % b == 0"),
        ("smaller than the difference of its two neighbours", "b < abs(a - c)"),
    )
    change, code = draw.one(
        ("replaced by 0", "0"),
        ("replaced by the sum of its neighbours", "a + c"),
        ("doubled", "2 * b"),
        ("left out", ""),
        ("replaced by its left neighbour", "a"),
    )
    append = f"found.append({code})" if code else "continue"
    return made(
        draw.one("edit_by_neighbours", "change_inner", "smooth_list"),
        NUMBERS,
        "list[int]",
        "Every number that has two neighbours and is $rule is $change; all others stay. All decisions are made on the "
        "list as it was given. Numbers are positive. Return the new list.",
        """
        found = numbers[:1]
        for a, b, c in zip(numbers, numbers[1:], numbers[2:]):
            if $test:
                $append
            else:
                found.append(b)
        return found + numbers[1:][-1:]
        """,
        draw.some(lambda: (draw.numbers(1, 9, 4, 9),)),
        [([],), ([5],), ([4, 2],)],
        values=locals(),
    )


@family
def moved_elements(draw: Draw) -> Problem:
    number = draw.randint(2, 7)
    which, test = draw.one(
        (f"multiples of {number}", f"n % {number} == 0"),
        (f"numbers below {number}", f"n < {number}"),
        ("odd numbers", "n % 2 == 1"),
        (f"numbers that have the digit {number}", f"'{number}' in str(n)"),
    )
    where, result = draw.one(("the front", "moved + others"), ("the end", "others + moved"))
    change, code = draw.one(
        ("keep their order", ""), ("are put in reversed order", "[::-1]"), ("are sorted in ascending order", "sorted")
    )
    moved = f"sorted(n for n in numbers if {test})" if code == "sorted" else f"[n for n in numbers if {test}]{code}"
    return made(
        draw.one("move_some", "bring_together", "regroup"),
        NUMBERS,
        "list[int]",
        "Move all $which to $where of the list. The moved numbers $change; the others keep their order. Numbers are "
        "not negative.",
        "moved = $moved\nothers = [n for n in numbers if not ($test)]\nreturn $result",
        draw.some(lambda: (draw.numbers(0, 40, 5, 10),)),
        [([],)],
        values=locals(),
    )


@family
def merged_lists(draw: Draw) -> Problem:
    rule, value = draw.one(
        ("the larger of the two", "max(a, b)"),
        ("the smaller of the two", "min(a, b)"),
        ("the first minus the second", "a - b"),
        ("their sum if it is even and 0 otherwise", "(a + b) if (a + b) % 2 == 0 else 0"),
        ("the first if it is odd and else the second", "a if a % 2 else b"),
    )
    longer, code = draw.one(
        ("is appended unchanged", "left[size:] + right[size:]"),
        ("is left out", ""),
        ("is appended in reversed order", "(left[size:] + right[size:])[::-1]"),
        (
            "is replaced by its sum, as one more number (if there is a rest)",
            "[sum(left[size:] + right[size:])] * (len(left) != len(right))",
        ),
    )
    return made(
        draw.one("combine_lists", "blend_lists", "join_by_rule"),
        {"left": "list[int]", "right": "list[int]"},
        "list[int]",
        "Combine the numbers that have the same position in both lists to $rule (the first is from left, the second "
        "from right). "
        "The rest of the longer list $longer. Return the new list.",
        "size = min(len(left), len(right))\nfound = [$value for a, b in zip(left, right)]\nreturn found"
        + (" + $code" if code else ""),
        draw.some(lambda: (draw.numbers(0, 15, 2, 6), draw.numbers(0, 15, 2, 6))),
        [([], []), ([3], [])],
        values=locals(),
    )
