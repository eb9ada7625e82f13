"""Further families that read a text in a small format."""

from __future__ import annotations

from benchmarks.results.programs.problem import NAMES, Draw, Problem, family, made


@family
def unpacked(draw: Draw) -> Problem:
    order, pattern = draw.one(
        ("a number followed by the letter", "(\\d+)([a-z])"), ("a letter followed by its number", "([a-z])(\\d+)")
    )
    n, c = ("a", "b") if order.startswith("a number") else ("b", "a")
    what, result, gives = draw.one(
        (
            "the text in which every letter is repeated as often as its number says",
            "''.join(c * n for c, n in pairs)",
            "str",
        ),
        (
            "the length of the text in which every letter is repeated as often as its number says",
            "sum(n for c, n in pairs)",
            "int",
        ),
        (
            "a dictionary from letters to the sums of their numbers",
            "{c: sum(k for d, k in pairs if d == c) for c, _ in pairs}",
            "dict[str, int]",
        ),
        (
            "the letters sorted by their numbers, largest first, equal ones alphabetically; each letter as often as "
            "it occurs",
            "''.join(c for c, n in sorted(pairs, key=lambda p: (-p[1], p[0])))",
            "str",
        ),
    )
    most = draw.one(0, 3, 5, 9)
    limit = f" A number above {most} counts as {most}." if most else ""
    cap = f"min(int({n}), {most})" if most else f"int({n})"
    return made(
        draw.one("unpack_letters", "expand_code", "letters_by_number"),
        {"text": "str"},
        gives,
        "The text is a sequence of pairs: $order that it belongs to (small letters; a number may have several "
        "digits).$limit Return $what."
        if order.startswith("a number")
        else "The text is a sequence of pairs: $order (small letters; a number may have several digits).$limit "
        "Return $what.",
        "import re\n\npairs = [($c, $cap) for a, b in re.findall(r'$pattern', text)]\nreturn $result",
        draw.some(
            lambda: (
                "".join(
                    f"{k}{x}" if n == "a" else f"{x}{k}"
                    for x, k in ((draw.one(*"abcd"), draw.randint(1, 12)) for _ in range(draw.randint(2, 4)))
                ),
            )
        ),
        [("",)],
        values=locals(),
    )


@family
def filled_template(draw: Draw) -> Problem:
    opening, closing = draw.one(("{", "}"), ("<", ">"), ("[", "]"), ("%", "%"))
    missing, code = draw.one(
        ("is left as it is, with its marks", "'$opening' + key + '$closing'"),
        ("is replaced by '?'", "'?'"),
        ("is removed", "''"),
        ("is replaced by its own name in capitals", "key.upper()"),
    )
    what, result, gives = draw.one(
        ("the filled text", "filled", "str"), ("the names that had no value, in order", "absent", "list[str]")
    )
    return made(
        draw.one("fill_template", "insert_values", "complete_letter"),
        {"text": "str", "table": "dict[str, str]"},
        gives,
        "In the text, a name between '$opening' and '$closing' is a gap. Each gap is replaced by the value that the "
        "table has for the name; a gap whose name is not in the table $missing. Return $what.",
        """
        import re

        absent = []

        def value(match):
            key = match.group(1)
            if key in table:
                return table[key]
            absent.append(key)
            return $code

        filled = re.sub(r'\\$opening(\\w+)\\$closing', value, text)
        return $result
        """,
        draw.some(
            lambda: (
                " ".join(
                    draw.one(word, f"{opening}{draw.one('who', 'what', 'when')}{closing}") for word in draw.words(3, 6)
                ),
                {key: draw.one(*NAMES) for key in draw.sample(("who", "what", "when"), 2)},
            )
        ),
        [("", {}), (f"to {opening}who{closing}", {})],
        values=locals(),
    )


@family
def event_log(draw: Draw) -> Problem:
    good, bad = draw.one(("login", "logout"), ("enter", "leave"), ("open", "close"), ("start", "stop"))
    what, result, gives = draw.one(
        ("the names that are still inside at the end, alphabetically", "sorted(inside)", "list[str]"),
        ("the largest number of names that were inside at the same time", "most", "int"),
        ("the number of lines that were ignored", "ignored", "int"),
        ("a dictionary that has for every name that was ever inside how often it came in", "visits", "dict[str, int]"),
    )
    sign = draw.one(" ", ",", ":")
    return made(
        draw.one("follow_log", "read_events", "who_is_inside"),
        {"lines": "list[str]"},
        gives,
        "Each line has a name and what it does, '$good' or '$bad', separated by '$sign'. After '$good' the name is "
        "inside, after '$bad' it is not. A '$good' of a name that is inside and a '$bad' of one that is not are "
        "ignored. Return $what.",
        """
        inside, most, ignored, visits = set(), 0, 0, {}
        for line in lines:
            name, action = line.split('$sign')
            if (action == '$good') == (name in inside):
                ignored += 1
            elif action == '$good':
                inside.add(name)
                visits[name] = visits.get(name, 0) + 1
                most = max(most, len(inside))
            else:
                inside.remove(name)
        return $result
        """,
        draw.some(
            lambda: ([f"{draw.one(*NAMES[:3])}{sign}{draw.one(good, good, bad)}" for _ in range(draw.randint(3, 8))],)
        ),
        [([],)],
        values=locals(),
    )


@family
def compared_versions(draw: Draw) -> Problem:
    sign = draw.one(".", "-", "_")
    what, result, gives = draw.one(
        ("the highest version, or '' if there is none", "max(versions, key=parts) if versions else ''", "str"),
        ("the versions from the lowest to the highest", "sorted(versions, key=parts)", "list[str]"),
        (
            "how many versions are higher than the first one",
            "sum(parts(v) > parts(versions[0]) for v in versions)",
            "int",
        ),
        (
            "for each version but the first one whether it is higher than the one before it",
            "[parts(a) < parts(b) for a, b in zip(versions, versions[1:])]",
            "list[bool]",
        ),
    )
    twist, key = draw.one(
        ("", "numbers"),
        (" The second number counts first, then the others in their order.", "[numbers[1], numbers[0], *numbers[2:]]"),
        (" The numbers are compared from the last one to the first.", "numbers[::-1]"),
    )
    return made(
        draw.one("order_versions", "compare_releases", "newest_release"),
        {"versions": "list[str]"},
        gives,
        "A version has three numbers, such as '1${sign}10${sign}2'. Versions are compared by their first numbers, "
        "if these are "
        "equal by their second ones, then by their third ones, always as numbers: 10 is higher than 9.$twist "
        "Return $what."
        if not twist
        else "A version has three numbers, such as '1${sign}10${sign}2', which are compared as numbers: 10 is "
        "higher than "
        "9.$twist The first difference decides which version is higher. Return $what.",
        """
        def parts(version):
            numbers = [int(part) for part in version.split('$sign')]
            return $key

        return $result
        """,
        draw.some(
            lambda: (
                list(
                    dict.fromkeys(
                        sign.join(str(draw.one(0, 1, 2, 9, 10, 11)) for _ in range(3))
                        for _ in range(draw.randint(2, 5))
                    )
                ),
            )
        ),
        [([],)],
        values=locals(),
    )
