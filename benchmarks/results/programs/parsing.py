"""Families that read a text in a small format."""

from __future__ import annotations

from benchmarks.results.programs.problem import NAMES, Draw, Problem, family, made

SETTINGS = ("size", "width", "depth", "speed", "level")


@family
def settings_text(draw: Draw) -> Problem:
    between, equal = draw.one(";", ",", "&", "|"), draw.one("=", ":", "->")
    twice, code = draw.one(
        ("the last value counts", "found[key] = int(value)"),
        ("the first value counts", "found.setdefault(key, int(value))"),
        ("the values are added", "found[key] = found.get(key, 0) + int(value)"),
        ("the largest value counts", "found[key] = max(int(value), found.get(key, int(value)))"),
    )
    return made(
        draw.one("read_settings", "parse_pairs", "text_to_table"),
        {"text": "str"},
        "dict[str, int]",
        "The text has entries such as 'size${equal}4', separated by '$between'. There may be spaces around keys and "
        "values. Return a dictionary from keys to whole numbers. If a key occurs more than once, $twice. Entries "
        "without '$equal' are ignored.",
        """
        found = {}
        for entry in text.split('$between'):
            if '$equal' in entry:
                key, value = entry.split('$equal')
                key = key.strip()
                $code
        return found
        """,
        draw.some(
            lambda: (
                between.join(
                    draw.one(
                        f"{draw.one(*SETTINGS[:4])}{equal}{draw.randint(0, 30)}",
                        f" {draw.one(*SETTINGS[:4])} {equal} {draw.randint(0, 30)}",
                        draw.one(*SETTINGS),
                    )
                    for _ in range(draw.randint(2, 6))
                ),
            )
        ),
        [("",)],
        values=locals(),
    )


@family
def number_ranges(draw: Draw) -> Problem:
    between, dash = draw.one(",", ";", " "), draw.one("-", "..", "to")
    what, result, gives = draw.one(
        ("the list of all these numbers in ascending order, each once", "sorted(set(found))", "list[int]"),
        ("how many different numbers these are", "len(set(found))", "int"),
        (
            "the numbers that occur more than once, in ascending order",
            "sorted({n for n in found if found.count(n) > 1})",
            "list[int]",
        ),
        ("the sum of all these numbers, a number that occurs twice counted twice", "sum(found)", "int"),
    )
    sign = "spaces" if between == " " else f"'{between}'"
    return made(
        draw.one("expand_ranges", "read_page_list", "parse_ranges"),
        {"text": "str"},
        gives,
        "The text has entries separated by $sign. An entry is a number such as '7' or a range such as "
        "'3${dash}6', which "
        "stands for all numbers from the first to the last; a range whose first number is larger than its last stands "
        "for nothing. Return $what.",
        """
        found = []
        for entry in text.split('$between'):
            if '$dash' in entry:
                low, high = entry.split('$dash')
                found.extend(range(int(low), int(high) + 1))
            elif entry:
                found.append(int(entry))
        return $result
        """,
        draw.some(
            lambda: (
                between.join(
                    str(low := draw.randint(1, 20)) + draw.one("", f"{dash}{low + draw.randint(-1, 5)}")
                    for _ in range(draw.randint(2, 5))
                ),
            )
        ),
        [("",)],
        values=locals(),
    )


@family
def stack_program(draw: Draw) -> Problem:
    names = draw.one(("add", "swap", "drop"), ("plus", "flip", "pop"), ("sum", "turn", "remove"))
    add, swap, drop = names
    third, code = draw.one(
        ("'double' doubles the top number", "stack.append(2 * stack.pop())"),
        ("'copy' pushes the top number once more", "stack.append(stack[-1])"),
        (
            "'sub' replaces the top two numbers by the lower one minus the top one",
            "stack[-2:] = [stack[-2] - stack[-1]]",
        ),
        ("'max' replaces the top two numbers by the larger one", "stack[-2:] = [max(stack[-2:])]"),
    )
    word, need = third.split("'")[1], 2 if "two" in third else 1
    what, result, gives = draw.one(
        ("the stack as a list, its top at the end", "stack", "list[int]"),
        ("the top of the stack, or 0 if it is empty", "stack[-1] if stack else 0", "int"),
        ("the number of instructions that were skipped", "skipped", "int"),
    )

    def program() -> str:
        words = [
            str(draw.randint(1, 9)) if draw.random() < 0.55 else draw.one(*names, word)
            for _ in range(draw.randint(4, 9))
        ]
        return " ".join([str(draw.randint(1, 9)), *words])

    return made(
        draw.one("run_stack", "stack_machine", "execute_words"),
        {"program": "str"},
        gives,
        "A program is words separated by spaces, which work on a stack that is empty at first. A number is pushed onto "
        "the stack; '$add' replaces the top two numbers by their sum; '$swap' exchanges the top two numbers; '$drop' "
        "removes the top number; $third. A word that needs more numbers than the stack has is skipped. Return $what.",
        """
        stack, skipped = [], 0
        needs = {'$add': 2, '$swap': 2, '$drop': 1, '$word': $need}
        for word in program.split():
            if len(stack) < needs.get(word, 0):
                skipped += 1
            elif word == '$add':
                stack[-2:] = [stack[-2] + stack[-1]]
            elif word == '$swap':
                stack[-2:] = [stack[-1], stack[-2]]
            elif word == '$drop':
                stack.pop()
            elif word == '$word':
                $code
            else:
                stack.append(int(word))
        return $result
        """,
        draw.some(lambda: (program(),)),
        [("",), (f"{add} {drop} {swap}",)],
        values=locals(),
    )


@family
def durations(draw: Draw) -> Problem:
    big, small, per = draw.one(
        ("h", "m", 60), ("w", "d", 7), ("d", "h", 24), ("f", "i", 12), ("k", "g", 1000), ("p", "q", 16)
    )
    limit = draw.randint(2, 4)
    what, result, gives = draw.one(
        ("the total in '$small'", "total", "int"),
        (
            "the total written in the same way, such as '${limit}${big}1${small}', with both units always present",
            "f'{total // $per}$big{total % $per}$small'",
            "str",
        ),
        (
            "how many whole '$big' the total has, and how many '$small' remain, as a tuple",
            "(total // $per, total % $per)",
            "tuple[int, int]",
        ),
        ("whether the total is more than $limit$big", "total > $limit * $per", "bool"),
    )

    def part() -> str:
        return draw.one(
            f"{draw.randint(1, 3)}{big}{draw.randint(0, per)}{small}",
            f"{draw.randint(1, 3)}{big}",
            f"{draw.randint(1, 2 * per)}{small}",
        )

    return made(
        draw.one("add_amounts", "total_of_parts", "sum_units"),
        {"parts": "list[str]"},
        gives,
        "Each part is a text such as '2${big}5${small}', '2$big' or '5$small', where 1 '$big' is $per '$small'. Add "
        "all parts and return $what.",
        """
        total = 0
        for part in parts:
            if '$big' in part:
                number, part = part.split('$big')
                total += $per * int(number)
            if part:
                total += int(part[:-1])
        return $result
        """,
        draw.some(lambda: ([part() for _ in range(draw.randint(1, 4))],)),
        [([],)],
        values=locals(),
    )


@family
def text_table(draw: Draw) -> Problem:
    between, place = draw.one(",", ";", "|"), draw.randint(1, 2)
    limit = draw.randint(10, 30)
    column = ("", "points", "age")[place]
    what, result, gives = draw.one(
        ("the sum of the $column of all rows", "sum(int(row[$place]) for row in rows)", "int"),
        (
            "the names of the rows whose $column is above $limit, in their order",
            "[row[0] for row in rows if int(row[$place]) > $limit]",
            "list[str]",
        ),
        (
            "the name of the row with the largest $column (of equal ones the first), or '' if there are no rows",
            "max(rows, key=lambda row: int(row[$place]))[0] if rows else ''",
            "str",
        ),
        (
            "the names sorted by $column in ascending order, equal ones in their order",
            "[row[0] for row in sorted(rows, key=lambda row: int(row[$place]))]",
            "list[str]",
        ),
    )
    head = between.join(("name", "points", "age"))

    def text() -> str:
        people = draw.sample(NAMES, draw.randint(2, 4))
        return "\n".join(
            [head, *(between.join((name, str(draw.randint(0, 40)), str(draw.randint(5, 60)))) for name in people)]
        )

    return made(
        draw.one("query_table", "read_rows", "table_question"),
        {"text": "str"},
        gives,
        "The first line of the text is '$head'; each further line is a row with these three columns, separated by "
        "'$between'. Lines that are empty are ignored. Return $what.",
        "rows = [line.split('$between') for line in text.splitlines()[1:] if line]\nreturn $result",
        draw.some(lambda: (text(),)),
        [(head,)],
        values=locals(),
    )


@family
def left_to_right(draw: Draw) -> Problem:
    meaning = {
        "+": "a + b",
        "-": "a - b",
        "x": "a * b",
        "^": "max(a, b)",
        "_": "min(a, b)",
        "%": "a % b",
        "@": "a * 10 + b",
    }
    words = {
        "+": "adds",
        "-": "subtracts",
        "x": "multiplies by",
        "^": "takes the larger of the result and",
        "_": "takes the smaller of the result and",
        "%": "takes the remainder after division by",
        "@": "multiplies by ten and then adds",
    }
    one, two, three = draw.sample(sorted(meaning), 3)
    rules = "; ".join(f"'{sign}' {words[sign]} the next number" for sign in (one, two, three))
    m1, m2, m3 = meaning[one], meaning[two], meaning[three]
    return made(
        draw.one("evaluate_chain", "simple_calculator", "compute_line"),
        {"line": "str"},
        "int",
        "The line has numbers and operators in turn, separated by single spaces, and begins with a number, which is "
        "the first result. Every operator is applied to the result so far, from left to right, without any precedence: "
        "$rules. Return the last result.",
        """
        words = line.split()
        a = int(words[0])
        for sign, word in zip(words[1::2], words[2::2]):
            b = int(word)
            if sign == '$one':
                a = $m1
            elif sign == '$two':
                a = $m2
            else:
                a = $m3
        return a
        """,
        draw.some(
            lambda: (
                " ".join(
                    [
                        str(draw.randint(1, 12)),
                        *(f"{draw.one(one, two, three)} {draw.randint(1, 9)}" for _ in range(draw.randint(1, 5))),
                    ]
                ),
            )
        ),
        [("8",)],
        values=locals(),
    )


@family
def checked_codes(draw: Draw) -> Problem:
    length, digits = draw.randint(5, 8), draw.randint(2, 3)
    rules = (
        ("it has at least $length characters", "len(code) >= $length"),
        ("it has exactly $digits digits", "sum(c.isdigit() for c in code) == $digits"),
        ("its first character is a letter", "code[:1].isalpha()"),
        ("no character stands next to an equal one", "all(a != b for a, b in zip(code, code[1:]))"),
        ("it has both small and capital letters", "any(c.islower() for c in code) and any(c.isupper() for c in code)"),
        ("its last character is a digit", "code[-1:].isdigit()"),
        ("it has no space", "' ' not in code"),
        ("it has one of the characters '#', '%' and '+'", "any(c in '#%+' for c in code)"),
    )
    (r1, t1), (r2, t2), (r3, t3) = draw.sample(rules, 3)
    what, result, gives = draw.one(
        ("whether the code fulfils all rules", "all(rules)", "bool"),
        (
            "the numbers of the rules that the code breaks",
            "[i for i, ok in enumerate(rules, 1) if not ok]",
            "list[int]",
        ),
        ("the number of rules that the code fulfils", "sum(rules)", "int"),
    )
    return made(
        draw.one("check_code", "inspect_code", "rate_password"),
        {"code": "str"},
        gives,
        "There are three rules for a code. Rule 1: $r1. Rule 2: $r2. Rule 3: $r3. Return $what.",
        "rules = [\n    $t1,\n    $t2,\n    $t3,\n]\nreturn $result",
        draw.some(lambda: (draw.letters("abTX 37#kQ", 4, 9),)),
        [("",), ("kT3#ab7x",), ("Abcdef#7",), ("a#Tbk37",), ("Xa7",), ("aTk3+bx1",), ("Qa b#37X",)],
        values=locals(),
    )
