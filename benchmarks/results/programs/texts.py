"""Families about characters and words."""

from __future__ import annotations

from benchmarks.results.programs.problem import Draw, Problem, family, made

TEXT = {"text": "str"}
CHARACTERS = (
    ("digits", "c.isdigit()"),
    ("capital letters", "c.isupper()"),
    ("small letters", "c.islower()"),
    ("vowels (in either case)", "c in 'aeiouAEIOU'"),
    ("consonants (in either case)", "(c.isalpha() and c not in 'aeiouAEIOU')"),
)
SIGNS = ("*", "#", "-", "_", "?")


def short(kind: str) -> str:
    return kind.partition(" (")[0].replace(" ", "_")


@family
def run_lengths(draw: Draw) -> Problem:
    order, piece = draw.one(
        ("letter followed by its count", "c + str(n)"), ("count followed by its letter", "str(n) + c")
    )
    least = draw.one(1, 2, 3)
    sign = draw.one("", "-", ".")
    joined = f"joined by '{sign}'" if sign else "joined without anything in between"
    return made(
        draw.one("squeeze_runs", "pack_letters", "compress_repeats"),
        TEXT,
        "str",
        "Split the text into runs of equal neighbouring characters. A run of at least $least characters becomes its "
        "$order; a shorter run stays as it is. Return the pieces $joined.",
        """
        runs = []
        for c in text:
            if runs and runs[-1][0] == c:
                runs[-1][1] += 1
            else:
                runs.append([c, 1])
        return '$sign'.join($piece if n >= $least else c * n for c, n in runs)
        """,
        draw.some(lambda: ("".join(draw.one(*"abxyz") * draw.randint(1, 4) for _ in range(draw.randint(2, 6))),)),
        [("",)],
        values=locals(),
    )


@family
def letters_of_words(draw: Draw) -> Problem:
    which, index = draw.one(("first", "0"), ("last", "-1"), ("second", "1"), ("second to last", "-2"))
    case, method = draw.one(("as a capital", ".upper()"), ("as a small letter", ".lower()"))
    least, sign = draw.one(2, 3, 4, 5), draw.one("", "-", "/")
    return made(
        draw.one("word_marks", "abbreviation", "make_code_name"),
        {"sentence": "str"},
        "str",
        "Words of the sentence are separated by spaces. Take the $which letter of every word with at least $least "
        "letters, $case, and join them with '$sign'. Shorter words are skipped.",
        "return '$sign'.join(word[$index]$method for word in sentence.split() if len(word) >= $least)",
        draw.some(lambda: (draw.mixed(3, 6),)),
        [("",), ("a of",)],
        values=locals(),
    )


@family
def masked(draw: Draw) -> Problem:
    kind, test = draw.one(*CHARACTERS)
    sign, kept = draw.one(*SIGNS), draw.randint(1, 4)
    end, sliced = draw.one(("last", "i >= len(text) - $kept"), ("first", "i < $kept"))
    return made(
        f"mask_{short(kind)}",
        TEXT,
        "str",
        "Replace all $kind of the text by '$sign', but leave the $end $kept characters of the text unchanged.",
        "return ''.join(c if $sliced or not $test else '$sign' for i, c in enumerate(text))",
        draw.some(lambda: (draw.mixed(1, 3),)),
        [("",), ("a1B",)],
        values=locals(),
    )


@family
def turned_blocks(draw: Draw) -> Problem:
    size, (which, parity) = draw.randint(2, 6), draw.one(("first, third, fifth", 0), ("second, fourth, sixth", 1))
    what, change = draw.one(
        ("reversed", "[::-1]"), ("written in capitals", ".upper()"), ("with its characters sorted", "")
    )
    changed = f"block{change}" if change else "''.join(sorted(block))"
    return made(
        draw.one("change_blocks", "scramble_blocks", "every_other_block"),
        TEXT,
        "str",
        "Cut the text into blocks of $size characters; the last block may be shorter. Return the text with the "
        "$which, ... block $what and the others unchanged.",
        """
        parts = []
        for number, start in enumerate(range(0, len(text), $size)):
            block = text[start:start + $size]
            parts.append($changed if number % 2 == $parity else block)
        return ''.join(parts)
        """,
        draw.some(lambda: (draw.letters("abcdefghkmnprst", 3, 16),)),
        [("",)],
        values=locals(),
    )


@family
def wrapped_lines(draw: Draw) -> Problem:
    width = draw.randint(9, 16)
    what, result, gives = draw.one(
        ("the list of lines", "lines", "list[str]"),
        ("the number of lines", "len(lines)", "int"),
        ("the lengths of the lines", "[len(line) for line in lines]", "list[int]"),
        ("the last word of every line", "[line.split()[-1] for line in lines]", "list[str]"),
    )
    return made(
        draw.one("wrap_words", "break_into_lines", "fold_sentence"),
        {"sentence": "str"},
        gives,
        "Write the words of the sentence into lines of at most $width characters, with one space between words. Each "
        "line takes as many words as fit, in order; a word that is longer than a line gets a line of its own. "
        "Return $what.",
        """
        lines = []
        for word in sentence.split():
            if lines and len(lines[-1]) + 1 + len(word) <= $width:
                lines[-1] += ' ' + word
            else:
                lines.append(word)
        return $result
        """,
        draw.some(lambda: (" ".join(draw.words(3, 9)),)),
        [("",)],
        values=locals(),
    )


@family
def changes_of_kind(draw: Draw) -> Problem:
    (first, one), (second, other) = draw.sample(CHARACTERS, 2)
    what, result, gives = draw.one(
        ("how often this happens", "len(found)", "int"),
        ("the positions of the second characters of such pairs", "[i + 1 for i in found]", "list[int]"),
        (
            "the first such pair as a text of two characters, or '' if there is none",
            "text[found[0]:found[0] + 2] if found else ''",
            "str",
        ),
    )
    return made(
        draw.one("kind_changes", "find_borders", "neighbour_kinds"),
        TEXT,
        gives,
        "Look at neighbouring characters of the text. A pair counts if its first character is one of the $first "
        "and its second one of the $second. Return $what.",
        """
        def is_first(c):
            return $one

        def is_second(c):
            return $other

        found = [i for i in range(len(text) - 1) if is_first(text[i]) and is_second(text[i + 1])]
        return $result
        """,
        draw.some(lambda: (draw.letters("aeXbkT7E2", 5, 14),)),
        [("",)],
        values=locals(),
    )


@family
def longest_stretch(draw: Draw) -> Problem:
    kind, test = draw.one(*CHARACTERS)
    tie, compare = draw.one(("first", ">"), ("last", ">="))
    what, result, gives = draw.one(
        ("the stretch itself ('' if there is none)", "best", "str"),
        ("the position at which it begins (-1 if there is none)", "start", "int"),
        ("the text without it", "text[:start] + text[start + len(best):] if best else text", "str"),
    )
    return made(
        f"longest_stretch_of_{short(kind)}",
        TEXT,
        gives,
        "Find the longest stretch of neighbouring characters that are all $kind; of several equally long ones take "
        "the $tie. Return $what.",
        """
        best, start, current = '', -1, ''
        for i, c in enumerate(text):
            current = current + c if $test else ''
            if current and len(current) $compare len(best):
                best, start = current, i - len(current) + 1
        return $result
        """,
        draw.some(lambda: (draw.letters("aeiBTR49xk", 8, 18),)),
        [("",), ("..",)],
        values=locals(),
    )


@family
def renamed_identifiers(draw: Draw) -> Problem:
    styles = {
        "snake case, such as 'two_words'": ("name.split('_')", "'_'.join(parts)", "_".join),
        "kebab case, such as 'two-words'": ("name.split('-')", "'-'.join(parts)", "-".join),
        "dotted form, such as 'two.words'": ("name.split('.')", "'.'.join(parts)", ".".join),
    }
    targets = {name: style[1] for name, style in styles.items()} | {
        "camel case, such as 'twoWords'": "''.join(p if i == 0 else p.capitalize() for i, p in enumerate(parts))",
        "Pascal case, such as 'TwoWords'": "''.join(p.capitalize() for p in parts)",
        "train case, such as 'Two-Words'": "'-'.join(p.capitalize() for p in parts)",
        "constant case, such as 'TWO_WORDS'": "'_'.join(p.upper() for p in parts)",
    }
    source, target = draw.one(*list(styles)), draw.one(*list(targets))
    while target == source:
        target = draw.one(*list(targets))
    dropped = draw.one("", "the", "get", "my")
    more = f" A part that is the word '{dropped}' is left out." if dropped else ""
    split, _, join = styles[source]
    target_code = targets[target]
    return made(
        draw.one("rename_identifier", "convert_name", "restyle_name"),
        {"name": "str"},
        "str",
        "Convert a name from $source, to $target. Empty parts are ignored.$more",
        """
        parts = [p for p in $split if p and p != '$dropped']
        return $target_code
        """,
        draw.some(lambda: (join([*draw.words(1, 3), draw.one("", "the", "get", "my"), *draw.words(0, 1)]),)),
        [("",)],
        values=locals(),
    )


@family
def word_scores(draw: Draw) -> Problem:
    value, score = draw.one(
        ("its place in the alphabet ('a' is 1, 'b' is 2, ...)", "ord(c) - 96"),
        ("5 if it is a vowel and 2 otherwise", "5 if c in 'aeiou' else 2"),
        ("1 if it comes before 'n' in the alphabet and 3 otherwise", "1 if c < 'n' else 3"),
    )
    limit, bonus = draw.randint(4, 6), draw.one(5, 10, 20)
    what, result, gives = draw.one(
        ("the word with the highest score; of equal ones the first", "max(words, key=score) if words else ''", "str"),
        ("the list of scores", "[score(word) for word in words]", "list[int]"),
        (
            "the words sorted by score, lowest first; equal ones keep their order",
            "sorted(words, key=score)",
            "list[str]",
        ),
    )
    empty = " If there are no words, return ''." if gives == "str" else ""
    return made(
        draw.one("score_words", "rate_words", "word_values"),
        {"words": "list[str]"},
        gives,
        "The score of a word of small letters is the sum over its letters, where a letter counts $value. A word of "
        "more than $limit letters gets $bonus points on top. Return $what.$empty",
        """
        def score(word):
            return sum($score for c in word) + ($bonus if len(word) > $limit else 0)

        return $result
        """,
        draw.some(lambda: (draw.words(2, 6),)),
        [([],)],
        values=locals(),
    )


@family
def zipped_texts(draw: Draw) -> Problem:
    size = draw.randint(1, 4)
    first, second = draw.one(("left", "right"), ("right", "left"))
    rest, code = draw.one(
        ("The rest of the longer text is appended.", ""),
        ("The rest of the longer text is appended backwards.", "[::-1]"),
        ("The rest of the longer text is appended in capitals.", ".upper()"),
    )
    return made(
        draw.one("zip_texts", "weave_texts", "shuffle_together"),
        {"left": "str", "right": "str"},
        "str",
        "Build a text by taking $size characters of $first, then $size of $second, and so on, as long as both still "
        "have at least $size characters. $rest If both have something left, the rest is what is left of $first "
        "followed by what is left of $second.",
        """
        parts = []
        while len($first) >= $size and len($second) >= $size:
            parts += [$first[:$size], $second[:$size]]
            $first, $second = $first[$size:], $second[$size:]
        return ''.join(parts) + ($first + $second)$code
        """,
        draw.some(lambda: (draw.letters("abcde", 2, 9), draw.letters("uvwxyz", 2, 9))),
        [("", ""), ("abc", "")],
        values=locals(),
    )


@family
def without_remarks(draw: Draw) -> Problem:
    opening, closing = draw.one(("<", ">"), ("[", "]"), ("{", "}"), ("(", ")"), ("!", ";"))
    what, keep = draw.one(("outside of remarks", "not inside"), ("inside of remarks", "inside"))
    change, code = draw.one(
        ("unchanged", "kept"),
        ("without spaces", "kept.replace(' ', '')"),
        ("in capitals", "kept.upper()"),
        ("backwards", "kept[::-1]"),
    )
    return made(
        draw.one("drop_remarks", "select_marked", "split_remarks"),
        TEXT,
        "str",
        "A remark begins with '$opening' and ends with the next '$closing'; an opening mark inside of a remark is "
        "an ordinary character. A remark that is never closed goes on to the end of the text. Return all characters "
        "$what, $change. "
        "The marks that begin and end remarks are left out.",
        """
        kept, inside = '', False
        for c in text:
            if not inside and c == '$opening':
                inside = True
            elif inside and c == '$closing':
                inside = False
            elif $keep:
                kept += c
        return $code
        """,
        draw.some(lambda: (draw.letters(f"abc de{opening}{closing}{opening}{closing}", 8, 18),)),
        [("",)],
        values=locals(),
    )


@family
def read_by_columns(draw: Draw) -> Problem:
    width, pad = draw.randint(2, 6), draw.one(".", "_", "x", "")
    direction, order = draw.one(("left to right", "range($width)"), ("right to left", "range($width - 1, -1, -1)"))
    padding = f"The last row is filled up with '{pad}'." if pad else "The last row may be shorter."
    fill = "text += '$pad' * (-len(text) % $width)\n" if pad else ""
    return made(
        draw.one("read_columns", "transpose_text", "column_cipher"),
        TEXT,
        "str",
        "Write the text into rows of $width characters, one below the other. $padding Return what is read column by "
        "column, from $direction, each column from top to bottom.",
        "${fill}return ''.join(text[i::$width] for i in $order)",
        draw.some(lambda: (draw.letters("abcdefghijklm", 4, 15),)),
        [("",)],
        values=locals(),
    )


@family
def every_kth_of_kind(draw: Draw) -> Problem:
    kind, test = draw.one(*CHARACTERS)
    step, sign = draw.randint(2, 4), draw.one(*SIGNS)
    what, action = draw.one(("replaced by '$sign'", "'$sign'"), ("written twice", "c + c"), ("left out", "''"))
    th = {2: "nd", 3: "rd", 4: "th"}[step]
    return made(
        f"change_some_{short(kind)}",
        TEXT,
        "str",
        "Count the $kind of the text from left to right. Return the text with every ${step}${th} one of them $what.",
        """
        parts, count = [], 0
        for c in text:
            if $test:
                count += 1
                parts.append($action if count % $step == 0 else c)
            else:
                parts.append(c)
        return ''.join(parts)
        """,
        draw.some(lambda: (draw.mixed(2, 4) + draw.letters("57Ab", 1, 4),)),
        [("",)],
        values=locals(),
    )


@family
def chosen_words(draw: Draw) -> Problem:
    which, test = draw.one(
        ("that begin and end with the same letter", "word[0] == word[-1]"),
        ("in which some letter stands twice in a row", "any(a == b for a, b in zip(word, word[1:]))"),
        ("that have no letter twice", "len(set(word)) == len(word)"),
        ("whose letters are in alphabetical order", "list(word) == sorted(word)"),
        ("with more vowels than consonants", "2 * sum(c in 'aeiou' for c in word) > len(word)"),
        ("whose last letter comes before the first one in the alphabet", "word[-1] < word[0]"),
    )
    what, result, gives = draw.one(
        ("how many there are", "len(found)", "int"),
        (
            "them sorted by length, equally long ones alphabetically",
            "sorted(found, key=lambda w: (len(w), w))",
            "list[str]",
        ),
        ("them in reversed order", "found[::-1]", "list[str]"),
        ("the number of letters that they have together", "sum(map(len, found))", "int"),
        ("the positions that they have in the list", "[i for i, w in enumerate(words) if w in found]", "list[int]"),
    )
    pool = (
        "level",
        "abbey",
        "solo",
        "area",
        "book",
        "dance",
        "elbow",
        "fist",
        "glass",
        "idea",
        "cool",
        "chimp",
        "tent",
        "audio",
        "sand",
        "zone",
        "yoga",
    )
    return made(
        draw.one("pick_words", "select_by_rule", "special_words"),
        {"words": "list[str]"},
        gives,
        "Consider the words $which. Return $what. Words are not empty and have small letters only.",
        "found = [word for word in words if $test]\nreturn $result",
        draw.some(lambda: (draw.sample(pool, draw.randint(4, 9)),)),
        [([],)],
        values=locals(),
    )
