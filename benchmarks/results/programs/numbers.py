"""Families about whole numbers."""

from __future__ import annotations

from benchmarks.results.programs.problem import Draw, Problem, family, made

NUMBER = {"n": "int"}


@family
def kept_digits(draw: Draw) -> Problem:
    digit = draw.randint(3, 7)
    which, test = draw.one(
        ("even digits", "int(d) % 2 == 0"),
        ("odd digits", "int(d) % 2 == 1"),
        ("digits above $digit", "int(d) > $digit"),
        ("digits below $digit", "int(d) < $digit"),
        ("digits other than $digit", "d != '$digit'"),
    )
    order, code = draw.one(
        ("in their order", "kept"),
        ("in reversed order", "kept[::-1]"),
        ("in ascending order", "sorted(kept)"),
        ("in descending order", "sorted(kept, reverse=True)"),
    )
    return made(
        draw.one("keep_digits", "filter_digits", "rebuild_number"),
        NUMBER,
        "int",
        "Return the number that is made of the $which of the positive number n, $order. If no digit is left, return 0.",
        """
        kept = [d for d in str(n) if $test]
        return int(''.join($code)) if kept else 0
        """,
        draw.some(lambda: (draw.randint(10, 99999),)),
        [(7,), (8,)],
        values=locals(),
    )


@family
def repeated_until_small(draw: Draw) -> Problem:
    limit = draw.one(10, 20, 50)
    what, rule = draw.one(
        ("the sum of the squares of its digits, halved and rounded down", "sum(int(d) ** 2 for d in str(n)) // 2"),
        ("its number of digits times its largest digit", "len(str(n)) * int(max(str(n)))"),
        (
            "the difference of its digits sorted in descending order and sorted in ascending order, divided by 9",
            "(int(''.join(sorted(str(n), reverse=True))) - int(''.join(sorted(str(n))))) // 9",
        ),
        ("the number without its last digit plus three times the last digit", "n // 10 + 3 * (n % 10)"),
        ("the number without its first digit plus that digit", "int(str(n)[1:] or '0') + int(str(n)[0])"),
    )
    wanted, result, gives = draw.one(
        ("the last value", "n", "int"),
        ("how many times this was done", "steps", "int"),
        ("the list of all values, beginning with n", "values", "list[int]"),
    )
    return made(
        draw.one("shrink_number", "reduce_by_digits", "digit_process"),
        NUMBER,
        gives,
        "As long as n has a value of at least $limit, and at most 12 times, replace it by $what. Return $wanted.",
        """
        steps, values = 0, [n]
        while n >= $limit and steps < 12:
            n = $rule
            steps += 1
            values.append(n)
        return $result
        """,
        draw.some(lambda: (draw.randint(20, 99999),)),
        [(5,)],
        values=locals(),
    )


@family
def counted_in_range(draw: Draw) -> Problem:
    a, b, digit = draw.randint(2, 5), draw.randint(6, 9), draw.randint(1, 9)
    which, test = draw.one(
        ("are multiples of $a but not of $b", "k % $a == 0 and k % $b != 0"),
        ("have the digit $digit", "'$digit' in str(k)"),
        ("have a digit sum that is a multiple of $a", "sum(map(int, str(k))) % $a == 0"),
        ("have no digit twice", "len(set(str(k))) == len(str(k))"),
        ("have digits that never decrease from left to right", "list(str(k)) == sorted(str(k))"),
        ("are multiples of their own last digit (which is not 0)", "k % 10 != 0 and k % (k % 10) == 0"),
        ("leave the remainder 1 when divided by $a or by $b", "k % $a == 1 or k % $b == 1"),
    )
    what, result, gives = draw.one(
        ("how many there are", "len(found)", "int"),
        ("their sum", "sum(found)", "int"),
        ("the largest of them, or -1 if there is none", "max(found, default=-1)", "int"),
        ("the first three of them (or fewer)", "found[:3]", "list[int]"),
    )
    return made(
        draw.one("numbers_in_range", "scan_range", "select_in_range"),
        {"low": "int", "high": "int"},
        gives,
        "Consider the whole numbers from low to high, both included, that $which. Return $what.",
        "found = [k for k in range(low, high + 1) if $test]\nreturn $result",
        draw.some(lambda: ((low := draw.randint(1, 120)), low + draw.randint(5, 60))),
        [(5, 4), (11, 11)],
        values=locals(),
    )


@family
def stepping(draw: Draw) -> Problem:
    divisor, factor, more = draw.randint(2, 5), draw.randint(2, 3), draw.randint(1, 5)
    modulus = draw.one(50, 97, 100, 64)
    what, result, gives = draw.one(
        ("the value after all steps", "x", "int"),
        ("the largest value, the first one included", "max(seen)", "int"),
        ("the list of all values, the first one included", "seen", "list[int]"),
        ("how many different values there are, the first one included", "len(set(seen))", "int"),
    )
    return made(
        draw.one("step_number", "run_machine", "iterate_rule"),
        {"x": "int", "steps": "int"},
        gives,
        "In each step, if x is a multiple of $divisor, it is divided by $divisor; otherwise it is multiplied by "
        "$factor, "
        "$more is added, and the remainder after division by $modulus is kept. Do this as often as steps says and "
        "return $what.",
        """
        seen = [x]
        for _ in range(steps):
            x = x // $divisor if x % $divisor == 0 else (x * $factor + $more) % $modulus
            seen.append(x)
        return $result
        """,
        draw.some(lambda: (draw.randint(1, 60), draw.randint(1, 7))),
        [(9, 0)],
        values=locals(),
    )


@family
def coin_purse(draw: Draw) -> Problem:
    coins = draw.one([10, 5, 1], [25, 10, 1], [20, 5, 2, 1], [50, 20, 5, 1], [12, 4, 1], [30, 6, 1], [100, 25, 5, 1])
    shown = ", ".join(map(str, coins))
    what, result, gives = draw.one(
        ("how many coins are paid", "sum(used)", "int"),
        ("a list with the number of coins of each value, in the order above", "used", "list[int]"),
        (
            "a dictionary from the values that are used to their numbers",
            "{coin: k for coin, k in zip(coins, used) if k}",
            "dict[int, int]",
        ),
        ("how many different values are used", "sum(k > 0 for k in used)", "int"),
    )
    most = draw.one(0, 2, 3)
    limit = f" There are only {most} coins of the value {coins[0]}." if most else ""
    first = f"min(amount // coin, {most}) if coin == {coins[0]} else amount // coin" if most else "amount // coin"
    return made(
        draw.one("pay_amount", "count_coins", "use_coins"),
        {"amount": "int"},
        gives,
        "An amount is paid with coins of the values $shown, always with the largest coin that still fits.$limit "
        "Return $what.",
        """
        coins, used = $coins, []
        for coin in coins:
            used.append($first)
            amount -= used[-1] * coin
        return $result
        """,
        draw.some(lambda: (draw.randint(3, 260),)),
        [(0,)],
        values=locals(),
    )


@family
def tariffs(draw: Draw) -> Problem:
    first, second = draw.one(10, 20, 50), draw.one(30, 40, 100)
    one, two, three = draw.sample((2, 3, 4, 5, 7, 9), 3)
    base, least = draw.one(0, 5, 12), draw.one(0, 40)
    fee = f" A fee of {base} is added unless no unit was used." if base else ""
    floor = f" If anything was used, the price is at least {least}." if least else ""
    total = second + first
    code = [f"price += {base} if units else 0"] if base else []
    code += [f"price = max(price, {least}) if units else 0"] if least else []
    more = "\n".join([*code, "return price"])
    return made(
        draw.one("price_of_units", "usage_price", "compute_bill"),
        {"units": "int"},
        "int",
        "Each of the first $first units costs $one, each of the next $second costs $two, and each unit beyond those "
        "$total costs $three.$fee$floor Return the price of the given number of units.",
        "price = $one * min(units, $first)\nprice += $two * min(max(units - $first, 0), $second)\n"
        "price += $three * max(units - $total, 0)\n" + more,
        draw.some(lambda: (draw.randint(1, 200),)),
        [(0,), (first,), (total,), (total + 1,)],
        values=locals(),
    )


@family
def rounded(draw: Draw) -> Problem:
    step = draw.one(4, 5, 6, 8, 10, 20)
    tie, code = draw.one(
        ("up", "(n + $step // 2) // $step * $step"),
        ("down", "-((-n + $step // 2) // $step) * $step"),
    )
    step = step if step % 2 == 0 else 2 * step
    what, result, gives = draw.one(
        ("the rounded numbers", "rounded", "list[int]"),
        ("how many of the numbers change", "sum(a != b for a, b in zip(numbers, rounded))", "int"),
        ("the sum of the rounded numbers minus the sum of the numbers", "sum(rounded) - sum(numbers)", "int"),
        ("the different rounded numbers in ascending order", "sorted(set(rounded))", "list[int]"),
    )
    return made(
        draw.one("round_to_step", "snap_numbers", "to_nearest"),
        {"numbers": "list[int]"},
        gives,
        "Round each number to the nearest multiple of $step; a number exactly between two multiples is rounded $tie. "
        "Return $what. Numbers are not negative.",
        "rounded = [$code for n in numbers]\nreturn $result",
        draw.some(lambda: ([*draw.numbers(0, 70, 3, 7), step // 2 + step * draw.randint(0, 3)],)),
        [([],)],
        values=locals(),
    )


@family
def bits(draw: Draw) -> Problem:
    a, b = draw.one("01", "10", "11", "00", "101", "110"), draw.randint(2, 4)
    what, code, gives = draw.one(
        (
            "how often '$a' occurs in it (occurrences may overlap)",
            "sum(text.startswith('$a', i) for i in range(len(text)))",
            "int",
        ),
        ("the length of its longest run of the digit ${bit}", "max(map(len, text.split('$other')))", "int"),
        (
            "the number that it stands for after every ${b}${th} digit from the left was flipped",
            "int(''.join(str(1 - int(c)) if i % $b == $b - 1 else c for i, c in enumerate(text)), 2)",
            "int",
        ),
        (
            "the number that it stands for when read from right to left, with '$a' appended at the end",
            "int(text[::-1] + '$a', 2)",
            "int",
        ),
        (
            "the positions of its digit $bit, counted from the right beginning with 0",
            "[i for i, c in enumerate(text[::-1]) if c == '$bit']",
            "list[int]",
        ),
        (
            "the number of ones at positions that are multiples of $b, counted from the left beginning with 0",
            "text[::$b].count('1')",
            "int",
        ),
    )
    th, bit = {2: "nd", 3: "rd", 4: "th"}[b], draw.one("0", "1")
    other = "1" if bit == "0" else "0"
    return made(
        draw.one("binary_fact", "look_at_bits", "bit_puzzle"),
        NUMBER,
        gives,
        "Write the positive number n in binary, without leading zeros. Return $what.",
        "text = format(n, 'b')\nreturn $code",
        draw.some(lambda: (draw.randint(1, 900),)),
        [(1,)],
        values=locals(),
    )


@family
def divisor_facts(draw: Draw) -> Problem:
    a = draw.randint(2, 6)
    which, test = draw.one(
        ("odd", "d % 2 == 1"),
        ("larger than $a", "d > $a"),
        ("no multiples of $a", "d % $a != 0"),
        ("of one digit", "d < 10"),
        ("even", "d % 2 == 0"),
    )
    what, result, gives = draw.one(
        ("their number", "len(found)", "int"),
        ("their sum", "sum(found)", "int"),
        (
            "the largest minus the smallest of them (0 if there are none)",
            "max(found) - min(found) if found else 0",
            "int",
        ),
        ("the list of them in descending order", "found[::-1]", "list[int]"),
    )
    return made(
        draw.one("divisor_fact", "study_divisors", "selected_divisors"),
        NUMBER,
        gives,
        "Consider those divisors of the positive number n, 1 and n included, that are $which. Return $what.",
        "found = [d for d in range(1, n + 1) if n % d == 0 and $test]\nreturn $result",
        draw.some(lambda: (draw.one(*range(6, 150, 6), *range(5, 90, 5)),)),
        [(1,), (13,)],
        values=locals(),
    )


@family
def growing_list(draw: Draw) -> Problem:
    first, second, cut = draw.randint(1, 4), draw.randint(1, 6), draw.one(10, 13, 20)
    rule, code = draw.one(
        ("the last number plus the sum of its digits", "a[-1] + sum(map(int, str(a[-1])))"),
        (
            "the sum of the last two numbers, of which only the remainder after division by $cut is kept",
            "(a[-1] + a[-2]) % $cut",
        ),
        (
            "twice the last number minus the one before it, plus the number of entries so far",
            "2 * a[-1] - a[-2] + len(a)",
        ),
        (
            "the number of entries so far if the last number is even, and else the last number plus the one before it",
            "len(a) if a[-1] % 2 == 0 else a[-1] + a[-2]",
        ),
        ("the largest number so far minus the one before the last, plus 1", "max(a) - a[-2] + 1"),
    )
    what, result, gives = draw.one(
        ("the first n numbers", "a[:n]", "list[int]"),
        ("number n of the list, where the first has the number 1", "a[n - 1]", "int"),
    )
    return made(
        draw.one("grow_list", "build_sequence", "next_by_rule"),
        NUMBER,
        gives,
        "A list begins with $first and $second. Every further number is $rule. Return $what (n is positive).",
        """
        a = [$first, $second]
        while len(a) < n:
            a.append($code)
        return $result
        """,
        [(k,) for k in (5, 4, 7, 3, 6, 9, 10, 12)],
        [(1,), (2,)],
        values=locals(),
    )
