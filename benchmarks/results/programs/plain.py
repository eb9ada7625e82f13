"""Families with a single rule, which small models solve too."""

from __future__ import annotations

from benchmarks.results.programs.problem import GOODS, NAMES, Draw, Problem, family, made

NUMBERS = {"numbers": "list[int]"}


@family
def chosen_numbers(draw: Draw) -> Problem:
    a, b = draw.randint(2, 9), draw.randint(12, 30)
    which, test = draw.one(
        ("are multiples of $a", "n % $a == 0"),
        ("are at least $a and at most $b", "$a <= n <= $b"),
        ("are below $a or above $b", "n < $a or n > $b"),
        ("have the last digit $a", "n % 10 == $a"),
    )
    what, result, gives = draw.one(
        ("the list of those numbers", "found", "list[int]"),
        ("their sum", "sum(found)", "int"),
        ("how many there are", "len(found)", "int"),
    )
    return made(
        draw.one("choose_numbers", "matching_numbers", "numbers_that_fit"),
        NUMBERS,
        gives,
        "Consider the numbers of the list that $which. Return $what.",
        "found = [n for n in numbers if $test]\nreturn $result",
        draw.some(lambda: (draw.numbers(0, 40, 5, 10),)),
        [([],)],
        values=locals(),
    )


@family
def changed_numbers(draw: Draw) -> Problem:
    a, b = draw.randint(2, 9), draw.randint(1, 20)
    how, value = draw.one(
        ("multiplied by $a and then increased by $b", "n * $a + $b"),
        ("subtracted from $b", "$b - n"),
        ("replaced by its remainder when divided by $a", "n % $a"),
        ("replaced by $b if it is smaller than $b", "max(n, $b)"),
        ("divided by $a and rounded down", "n // $a"),
    )
    return made(
        draw.one("change_numbers", "apply_to_all", "convert_list"),
        NUMBERS,
        "list[int]",
        "Return a new list in which every number is $how.",
        "return [$value for n in numbers]",
        draw.some(lambda: (draw.numbers(0, 40, 2, 7),)),
        [([],)],
        values=locals(),
    )


@family
def joined_words(draw: Draw) -> Problem:
    sign = draw.one("-", "+", "/", ", ", "_")
    how, value = draw.one(
        ("in capitals", "word.upper()"),
        ("backwards", "word[::-1]"),
        ("with a capital at the beginning", "word.capitalize()"),
        ("without its first letter", "word[1:]"),
        ("written twice", "word * 2"),
        ("followed by its length", "word + str(len(word))"),
    )
    return made(
        draw.one("connect_words", "words_to_line", "build_line"),
        {"words": "list[str]"},
        "str",
        "Join the words with '$sign', each word $how. Return the text.",
        "return '$sign'.join($value for word in words)",
        draw.some(lambda: (draw.words(1, 5),)),
        [([],)],
        values=locals(),
    )


@family
def two_numbers(draw: Draw) -> Problem:
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    what, value = draw.one(
        ("the larger number plus $a times the smaller one", "max(x, y) + $a * min(x, y)"),
        ("$a times x minus $b times y", "$a * x - $b * y"),
        ("the distance of x and y, multiplied by $a", "abs(x - y) * $a"),
        ("x + y if the sum is at least $limit, and otherwise $limit", "max(x + y, $limit)"),
        ("x * y if x is larger than y, and otherwise x + y + $a", "x * y if x > y else x + y + $a"),
    )
    limit = 10 * a
    return made(
        draw.one("two_to_one", "number_from_two", "calculate_pair"),
        {"x": "int", "y": "int"},
        "int",
        "For two whole numbers x and y, return $what.",
        "return $value",
        draw.some(lambda: (draw.randint(0, 50), draw.randint(0, 50))),
        [(4, 4)],
        values=locals(),
    )


@family
def table_values(draw: Draw) -> Problem:
    limit = draw.randint(3, 15)
    which, test = draw.one(("above $limit", "n > $limit"), ("of at most $limit", "n <= $limit"))
    what, result, gives = draw.one(
        (
            "the names with a value $which, in alphabetical order",
            "sorted(name for name, n in table.items() if $test)",
            "list[str]",
        ),
        ("the sum of all values $which", "sum(n for n in table.values() if $test)", "int"),
        (
            "a dictionary of the entries with a value $which",
            "{name: n for name, n in table.items() if $test}",
            "dict[str, int]",
        ),
    )
    return made(
        draw.one("look_at_table", "table_entries", "entries_by_value"),
        {"table": "dict[str, int]"},
        gives,
        "The table has a value for each name. Return $what.",
        "return $result",
        draw.some(lambda: (draw.table(NAMES, 0, 20, 2, 6),)),
        [({},)],
        values=locals(),
    )


@family
def repeated_text(draw: Draw) -> Problem:
    sign, more = draw.one("-", "*", "|", "~"), draw.randint(1, 3)
    what, value = draw.one(
        ("the text n times in a row, with '$sign' in between", "'$sign'.join([text] * n)"),
        ("the text with n times '$sign' before it and n times '$sign' after it", "'$sign' * n + text + '$sign' * n"),
        ("the text followed by its first $more characters, all of this n times", "(text + text[:$more]) * n"),
        (
            "the text in which every character stands n times, with '$sign' at the end",
            "''.join(c * n for c in text) + '$sign'",
        ),
    )
    return made(
        draw.one("repeat_text", "decorate_text", "extend_text"),
        {"text": "str", "n": "int"},
        "str",
        "Return $what. n is at least 1.",
        "return $value",
        draw.some(lambda: (draw.letters("abcdxyz", 3, 6), draw.randint(1, 4))),
        [("", 2)],
        values=locals(),
    )


@family
def shop_prices(draw: Draw) -> Problem:
    price, many, less = draw.randint(3, 12), draw.randint(4, 10), draw.randint(1, 9)
    rule, value = draw.one(
        (
            "if at least $many are bought, the whole price is reduced by $less",
            "$price * count - ($less if count >= $many else 0)",
        ),
        ("if more than $many are bought, every one costs 1 less", "($price - 1 if count > $many else $price) * count"),
        ("of every $many that are bought, one is free", "$price * (count - count // $many)"),
        ("for fewer than $many, $less is added", "$price * count + ($less if count < $many else 0)"),
    )
    good = draw.one(*GOODS)
    return made(
        f"price_of_{good}",
        {"count": "int"},
        "int",
        "Each of the $good costs $price; $rule. Return the price of the given count, which is at least 1.",
        "return $value",
        draw.some(lambda: (draw.randint(1, 30),)),
        [(1,), (many,), (many + 1,)],
        values=locals(),
    )


@family
def list_parts(draw: Draw) -> Problem:
    a, b = draw.randint(1, 4), draw.randint(2, 4)
    what, value = draw.one(
        (
            "its first $a items followed by its last $b items; the list has at least $most items",
            "items[:$a] + items[-$b:]",
        ),
        ("its items without the first $a and without the last $b; the list has at least $most items", "items[$a:-$b]"),
        ("every ${b}${th} item, beginning with the first one", "items[::$b]"),
        ("its items in reversed order, without the last $a of the given list", "items[:-$a][::-1]"),
        ("its last $b items, followed by all items before them", "items[-$b:] + items[:-$b]"),
    )
    most, th = a + b, {2: "nd", 3: "rd", 4: "th"}[b]
    return made(
        draw.one("part_of_list", "take_items", "list_piece"),
        {"items": "list[int]"},
        "list[int]",
        "For the given list return $what.",
        "return $value",
        draw.some(lambda: (draw.numbers(0, 30, most, most + 5),)),
        values=locals(),
    )


@family
def word_filters(draw: Draw) -> Problem:
    letter, size = draw.one(*"aeirm"), draw.randint(4, 6)
    which, test = draw.one(
        ("have at least $size letters", "len(word) >= $size"),
        ("have the letter '$letter'", "'$letter' in word"),
        ("do not have the letter '$letter'", "'$letter' not in word"),
        ("end with '$letter' or have exactly $size letters", "word.endswith('$letter') or len(word) == $size"),
    )
    what, result, gives = draw.one(
        ("them in capitals", "[word.upper() for word in found]", "list[str]"),
        ("them in alphabetical order", "sorted(found)", "list[str]"),
        ("their lengths", "[len(word) for word in found]", "list[int]"),
        ("them as one text, with spaces in between", "' '.join(found)", "str"),
    )
    return made(
        draw.one("filter_words", "words_that_fit", "matching_words"),
        {"words": "list[str]"},
        gives,
        "Take the words of the list that $which. Return $what.",
        "found = [word for word in words if $test]\nreturn $result",
        draw.some(lambda: (draw.words(4, 8),)),
        [([],)],
        values=locals(),
    )


@family
def unit_sums(draw: Draw) -> Problem:
    big, small, size = draw.one(
        ("boxes", "eggs", 12),
        ("weeks", "days", 7),
        ("hours", "minutes", 60),
        ("crates", "jars", 24),
        ("sets", "cards", 32),
    )
    more = draw.randint(1, 9)
    what, value = draw.one(
        ("how many $small these are together with $count", "$size * count + $more"),
        ("how many $small are left if $more are taken away (not below 0)", "max(0, $size * count - $more)"),
        ("how many whole $big can be made of so many $small", "count // $size"),
        ("how many $small remain if so many $small are put into whole $big", "count % $size"),
    )
    what = what.replace("$count", f"{more} more {small}")
    given = f"a number of {small}" if "so many" in what else f"a number of {big}"
    return made(
        draw.one("convert_units", "unit_question", "count_units"),
        {"count": "int"},
        "int",
        "Of the $big, each has $size $small. Given $given, return $what.",
        "return $value",
        draw.some(lambda: (draw.randint(1, 200),)),
        [(0,)],
        values=locals(),
    )


@family
def best_of_list(draw: Draw) -> Problem:
    number = draw.randint(5, 25)
    what, value = draw.one(
        ("the largest number plus the smallest number", "max(numbers) + min(numbers)"),
        (
            "the largest number below $number, or 0 if there is none",
            "max((n for n in numbers if n < $number), default=0)",
        ),
        (
            "the smallest number above $number, or $number if there is none",
            "min((n for n in numbers if n > $number), default=$number)",
        ),
        (
            "the position of the first number above $number, or -1",
            "next((i for i, n in enumerate(numbers) if n > $number), -1)",
        ),
        (
            "the number that is nearest to $number, of two equally near ones the smaller",
            "min(numbers, key=lambda n: (abs(n - $number), n))",
        ),
    )
    return made(
        draw.one("one_of_list", "find_number", "single_number"),
        NUMBERS,
        "int",
        "For a list of numbers that is not empty return $what.",
        "return $value",
        draw.some(lambda: (draw.numbers(0, 40, 3, 8),)),
        [([7],)],
        values=locals(),
    )


@family
def replaced_letters(draw: Draw) -> Problem:
    a, b, c = draw.sample("abcdef", 3)
    what, value = draw.one(
        ("every '$a' replaced by '$b'", "text.replace('$a', '$b')"),
        ("'$a' and '$b' exchanged everywhere", "''.join({'$a': '$b', '$b': '$a'}.get(x, x) for x in text)"),
        ("every '$a' and every '$c' left out", "''.join(x for x in text if x not in '$a$c')"),
        ("'$b' inserted after every '$a'", "text.replace('$a', '$a$b')"),
        (
            "all that stands after the first '$c' left out (nothing is left out if there is no '$c')",
            "text[:text.index('$c') + 1] if '$c' in text else text",
        ),
    )
    return made(
        draw.one("replace_letters", "edit_letters", "alter_text"),
        {"text": "str"},
        "str",
        "Return the text with $what.",
        "return $value",
        draw.some(lambda: (draw.letters("abcdef", 4, 10),)),
        [("",)],
        values=locals(),
    )
