"""What kind of thing an answer is: a number, a set, a pair or interval, an equation, an inequality, a ratio, words, ...

`form` reads a text in canonical notation from the outside inward: separators first, then relations, then brackets.
What is left is an expression with perhaps a unit, read by `reader.py`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property

from paddock.grading.limits import MOST_MEMBERS, TooLarge, Unread
from paddock.grading.reader import Node, read
from paddock.grading.units import without_unit
from paddock.grading.values import letters_of


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Numeral:
    """A number written in a base other than ten. The way it is written is the answer: `11_2` is not `3`."""

    digits: str
    base: int


@dataclass(frozen=True)
class Scalar:
    """An expression and its unit."""

    text: str
    unit: str | None = None

    @cached_property
    def tree(self) -> Node | None:
        """Returns the tree of the text; None if it has no grammar here."""
        try:
            return read(self.text)
        except Unread:
            return None


@dataclass(frozen=True)
class Group:
    """Members in order, in brackets: a pair, a point, a vector, or an interval."""

    members: tuple[Form, ...]
    opening: str
    closing: str


@dataclass(frozen=True)
class Many:
    """Members in any order. `braces`: written as a set. `joint`: the word between them, or `±`."""

    members: tuple[Form, ...]
    braces: bool = False
    joint: str = ","


@dataclass(frozen=True)
class Equation:
    """`left = right`, or `left ∈ right`; of a chain, `rights` are all that follow. No left: all are values."""

    left: Form | None
    rights: tuple[Form, ...]
    sign: str = "="


@dataclass(frozen=True)
class Inequality:
    members: tuple[Form, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Sets:
    """`first ∪ second ∖ third`: from left to right."""

    members: tuple[Form, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Ratio:
    members: tuple[Form, ...]


@dataclass(frozen=True)
class Residue:
    value: Form
    modulus: Form


@dataclass(frozen=True)
class Option:
    """The letter of an option, and what it says, if that is given too."""

    letter: str
    content: Form | None


Form = Words | Numeral | Scalar | Group | Many | Equation | Inequality | Sets | Ratio | Residue | Option

NOTHING, EVERYTHING = Many((), braces=True), Words("ℝ")
MEANINGS: dict[str, Form] = {
    **dict.fromkeys(
        ("no solution", "no solutions", "no real solution", "no real solutions", "none", "empty set"), NOTHING
    ),
    **dict.fromkeys(
        ("all real numbers", "all reals", "all real", "real numbers", "reals", "any real number"), EVERYTHING
    ),
    **{"infinity": Scalar("∞"), "positive infinity": Scalar("∞"), "negative infinity": Scalar("-∞")},
    **dict.fromkeys(("does not exist", "dne", "doesnt exist"), Words("does not exist")),
    **dict.fromkeys(("infinitely many", "infinite", "infinitely many solutions"), Words("infinitely many")),
}
ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
COUNTS = {word: number for number, word in enumerate(ONES.split())}
COUNTS |= {word: 10 * number for number, word in enumerate(TENS.split(), start=2)}
COUNTS |= {"hundred": 100, "thousand": 1000, "million": 10**6}
BASES = COUNTS | {"binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16}
SHORT_WORDS = ("yes", "no", "odd", "red", "dne")
OPENING, CLOSING = "([{⦃⟨⌊⌈⟦", ")]}⦄⟩⌋⌉⟧"
RELATIONS = "=≈≡∈<>≤≥≠"
THOUSANDS = re.compile(r"((?:\\?\$)? ?-? ?(?:\\?\$)? ?)(\d{1,3}(?:,\d{3})+)(?!\d)(?!,)([^,]*)")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
SEPARATOR = re.compile(r",|;|\\text\{ *,? *(and|or) *,? *\}|(?<=[ \d})⦄\]A-Za-z])(and|or)(?=[ \d\\({⦃\[-])|⏎")
NUMERAL = re.compile(
    r"\(?\s*([0-9A-Za-z ]+(?:\.[0-9A-Za-z]+)?)\s*\)?\s*"
    r"(?:_\s*\{?\s*(?:\\text\{)?\s*(?:base )?(\d+|[a-z]+)\s*\}?\s*\}?"
    r"|\(?\s*(?:\\text\{)?\s*\(?\s*(?:in )?base \}?\s*(\d+|[a-z]+)\s*\}?\s*\)?\s*\}?)"
)
MODULUS = re.compile(
    r"(.*?)(?:\\pmod *\{?([^{}]+)\}?|\\bmod *(.+)|\( *(?:\\mod|\\text\{ *mod *\}|mod) *([^()]+)\)|\\mod *(.+))"
)
LABEL = re.compile(r"(?:\\text\{ *)?\( *([A-Ja-j]) *\)(?: *\}| +|$)(.*)|(?:\\text\{ *)?([A-E])[.):](?: *\}| +|$)(.*)")
LABELLED = re.compile(r"(?<![A-Za-z])(?:[(\[] *[A-Ja-j] *[)\]]|[A-E][.):])")
SMALL_LABEL = re.compile(r"(?<![A-Za-z])[(\[] *[a-j] *[)\]]")
ALONE = re.compile(r"(?<![A-Za-z])[A-Ja-j](?![A-Za-z])")
LEAD = re.compile(r"(?:\\text\{)?\s*(?:the )?(?:final )?answers?\s*(?:is|are|:)\s*:?\s*\}?\s*", re.IGNORECASE)
POINT = re.compile(r"[ABD-Z]'? ?(?=\()")  # C(5, 2) is a binomial
CONDITION = re.compile(r" *[A-Za-z] *(?:∈ *ℝ *)?[|:](.+)")
CLOCK = re.compile(r"\s*(\d{1,2})(?:\s*:\s*(\d\d))?\s*([AaPp])\.?\s?[Mm]\.?\s*")
PARAMETER = re.compile(
    r"(?:for |where |\\text\{[^{}]*\} *)*([a-zA-Z]) ?∈ ?[ℤℕ](?:\^[+*])?"
    r"|(?:\\text\{|for |where )[^{}]*\binteger[^{}]*\}? *([a-zA-Z])?"
)
"""`k ∈ ℤ` after a family of solutions: its letter may be any."""


def form(text: str) -> Form:
    """The kind of answer that this text is."""
    text = text.strip(" ,;").rstrip(".")
    if whole := TEXT.fullmatch(text):
        text = whole[1].strip(" ,;").rstrip(".")
    text = LEAD.sub("", text, count=1) if LEAD.match(text) else text
    if not text:
        raise Unread("nothing")
    if match := LABEL.fullmatch(text):
        letter, content = match[1] or match[3], (match[2] or match[4] or "").strip(" }")
        return Option(letter, form(content) if content and not _is_option(content, letter) else None)
    if match := CLOCK.fullmatch(plain(text)):
        return Words(f"{int(match[1])}:{match[2] or '00'} {match[3].lower()}m")
    for reading in READINGS:
        if (kind := reading(text)) is not None:
            return kind
    return scalar(text)


def _is_option(content: str, letter: str) -> bool:
    """True if what stands behind an option's letter names a further option, as in `(A) B` and `(A) (B) 12`. The parts
    of `(a) 5, (b) 6` are members of a list."""
    if like_option(content.strip("[](){} "), letter):
        return True
    return bool(LABELLED.search(content)) and len(split_list(content)[0]) == 1


def like_option(text: str, letter: str) -> bool:
    """True if the text is a letter that names an option where this letter does."""
    return bool(ALONE.fullmatch(text)) and text.isupper() == letter.isupper()


def options(text: str) -> set[str]:
    """Returns the letters A to J, as capitals, that stand alone in the text; small ones only beside one in brackets."""
    plain_text = unicodedata.normalize("NFKC", text)  # circled and wide letters
    small = SMALL_LABEL.search(plain_text)
    return {letter.upper() for letter in ALONE.findall(plain_text) if small or letter.isupper()}


def names_option(read: Form) -> bool:
    """True for an option's letter, with or without what it says. A small letter without brackets is a variable."""
    tree = read.tree if isinstance(read, Scalar) else None
    return isinstance(read, Option) or (tree is not None and not tree.parts and like_option(tree.name, "A"))


def scalar(text: str) -> Scalar:
    bare, unit = without_unit(text)
    measured = Scalar(bare, unit)
    if bare == text or measured.tree is not None:
        return measured
    return Scalar(text)  # the noun of `\\angle ABC` is its name


def plain(text: str) -> str:
    return TEXT.sub(r" \1 ", text)


def _words(text: str) -> Form | None:
    """Words, unless their letters may be variables: `xy`, `a b`."""
    if text in ("ℝ", "ℤ", "ℕ", "ℚ", "ℂ"):
        return Words(text)
    if text == "∅":
        return NOTHING
    said = plain(text)
    if r"\text" in text and re.fullmatch(r"[A-Za-z]", TEXT.sub("", text).strip()):  # `x\text{ cm}`
        return None
    if not re.fullmatch(r"[A-Za-z .'\"!?-]+", said) or re.search(r"\b(?:and|or)\b", said):
        return None
    words = re.sub(r"[^A-Za-z ]", " " if "-" in said else "", said).split()
    if not words or max(map(len, words)) < 2:
        return None
    known = words[0].lower() in SHORT_WORDS or words[0].lower() in COUNTS or words[0].isupper()
    if len(words) == 1 and len(words[0]) < 4 and "\\text" not in text and not known:
        return None
    return _meaning(words)


def _meaning(words: list[str]) -> Form:
    if len(words) > 1:
        words = [word for word in words if word.lower() not in ("a", "an", "the")] or words
    if len(words) == 1 and len(words[0]) == 2 and words[0].lower() not in ("no", "ok"):
        return Words(words[0])  # `AB` is not `ab`
    lower = [word.lower() for word in words]
    if all(word in COUNTS for word in lower):
        return Scalar(str(_counted(lower)))
    text = " ".join(lower)
    return MEANINGS.get(text, Words(text))


def _counted(words: list[str]) -> int:
    """`two hundred five` -> 205"""
    total, current = 0, 0
    for number in (COUNTS[word] for word in words):
        if number == 100:
            current = max(current, 1) * 100
        elif number > 100:
            total, current = total + max(current, 1) * number, 0
        else:
            current += number
    return total + current


def _residue(text: str) -> Form | None:
    match = MODULUS.fullmatch(text)
    if not match or "mod" not in text:
        return None
    value = match[1].rpartition("≡")[2]
    return Residue(form(value), form(next(part for part in match.groups()[1:] if part).strip(" )}")))


def _assigned(text: str) -> Form | None:
    """`x = 1, 2`: one equation, before its right side is split."""
    for sign in ("=", "∈"):
        parts, _ = split_signs(text, sign)
        if len(parts) != 2 or any(split_signs(text, other)[1] for other in RELATIONS if other != sign):
            continue
        if len(split_list(parts[0])[0]) == 1 and not PARAMETER.fullmatch(text):
            return _equation(parts, sign)
    return None


def _equation(parts: list[str], sign: str = "=") -> Form:
    left, *rights = map(form, parts)
    if len(rights) == 1 and sign == "=" and is_name(rights[0]) and isinstance(left, Scalar) and not is_name(left):
        left, rights = rights[0], [left]
    if isinstance(left, Scalar) and left.tree is not None and not letters_of(left.tree):
        return Equation(None, (left, *rights))
    return Equation(left, tuple(rights), sign)


def is_name(left: Form | None) -> bool:
    """A letter, `f(x)`, `AB`, words, or a tuple of letters: what an answer is assigned to."""
    if isinstance(left, Group):
        return all(map(is_name, left.members))
    if isinstance(left, Words) or left is None:
        return True
    if not isinstance(left, Scalar):
        return False
    if left.tree is None:
        return bool(re.match(r"\\(?:angle|triangle|text|overline|measuredangle)|[A-Za-z]\s*\(", left.text))
    named = re.fullmatch(r"\|?[A-Z]{2,3}\|?|[A-Z]\([^()]*\)", left.text)
    return left.tree.kind in ("letter", "apply") or named is not None


def _thousands(text: str) -> Form | None:
    match = THOUSANDS.fullmatch(text)
    return form(match[1] + match[2].replace(",", "") + match[3]) if match else None


def _listed(text: str) -> Form | None:
    pieces, joints = split_list(text)
    if len(pieces) == 1:
        return None
    if len(pieces) > MOST_MEMBERS:
        raise TooLarge("members")
    kept = [piece for piece in pieces if not PARAMETER.fullmatch(piece)]
    if 0 < len(kept) < len(pieces):
        for name in filter(None, (match[1] or match[2] for match in map(PARAMETER.fullmatch, pieces) if match)):
            kept = [re.sub(rf"(?<![\\A-Za-z]){name}(?![A-Za-z])", r"\\kappa ", piece) for piece in kept]
        return form(", ".join(kept))
    members = [form(piece) for piece in pieces]
    joints |= {member.joint for member in members if isinstance(member, Many)}
    members = [each for member in members for each in _flat(member)]  # `0, ±1`
    return Many(tuple(members), joint=next((joint for joint in ("±", "or", "and") if joint in joints), ","))


def _flat(member: Form) -> tuple[Form, ...]:
    return member.members if isinstance(member, Many) and not member.braces else (member,)


def _related(text: str) -> Form | None:
    parts, signs = split_signs(text, RELATIONS)
    if not signs:
        return None
    if set(signs) <= {"=", "≡"}:
        return _equation(parts)
    if set(signs) <= {"=", "≈"}:
        return _approximated(parts, signs)
    if set(signs) <= set("<>≤≥≠") and all(part.strip() for part in parts):
        return Inequality(tuple(map(form, parts)), tuple(signs))
    if signs == ["∈"]:
        return _equation(parts, "∈")
    raise Unread(text)


def _approximated(parts: list[str], signs: list[str]) -> Form:
    r"""`x = \sqrt2 ≈ 1.41` says `\sqrt2`; `x ≈ 1.41` says `1.41`."""
    place = signs.index("≈")
    left = form(parts[0])
    if place == 0 and not is_name(left):
        return left
    return _equation(parts[: max(place + 1, 2)])


def _sets(text: str) -> Form | None:
    parts, signs = split_signs(text, "∪∩∖")
    return Sets(tuple(map(form, parts)), tuple(signs)) if signs and all(part.strip() for part in parts) else None


def _braced(text: str) -> Form | None:
    """`⦃1, 2⦄`; `⦃x | x > 2⦄` is what its condition says."""
    if text[0] != "⦃" or not _one_pair(text):
        return None
    inside = text[1:-1]
    if not inside.strip():
        return NOTHING
    if match := CONDITION.fullmatch(inside):
        return form(match[1])
    if re.search(r"[|:]", inside):
        raise Unread("a set by its property")
    members = form(inside)
    return Many(members.members if isinstance(members, Many) else (members,), braces=True)


def _plus_minus(text: str) -> Form | None:
    if "±" not in text and "∓" not in text:
        return None
    upper = text.replace("±", "+").replace("∓", "-")
    lower = text.replace("±", "-").replace("∓", "+")
    return Many((form(upper), form(lower)), joint="±")


def _bracketed(text: str) -> Form | None:
    """`(1, 2]`, `⟨1, 2⟩`, a point `P(1, 2)`; brackets around one member only group."""
    if (match := POINT.match(text)) and "," in text:
        text = text[match.end() :]
    opening, closing = text[0], text[-1]
    if len(text) < 2 or opening not in "([⟨" or closing not in ")]⟩" or not _one_pair(text):
        return None
    inside = text[1:-1]
    pieces, _ = split_list(inside)
    if len(pieces) == 1:
        return None if opening in "([" and Scalar(text).tree is not None else form(inside)
    if len(pieces) > MOST_MEMBERS:
        raise TooLarge("members")
    return Group(tuple(map(form, pieces)), opening, closing)


def _one_pair(text: str) -> bool:
    """True if the first bracket closes with the last: not so in `(1, 2) ∪ (3, 4)`."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign in OPENING) - (sign in CLOSING)
        if depth == 0:
            return place == len(text) - 1
    return False


def _ratio(text: str) -> Form | None:
    parts, _ = split_signs(re.sub(r"(?:\\text\{ *to *\}| to )", ":", text), ":")
    if len(parts) == 1 or not all(re.fullmatch(r"[\s\d.A-Za-z\\{}^+*()/-]+", part) for part in parts):
        return None
    return Ratio(tuple(map(form, parts)))


def _numeral(text: str) -> Form | None:
    match = NUMERAL.fullmatch(re.sub(r"^\\text\{([0-9A-Za-z]+)\}", r"\1", text))
    if not match:
        return None
    digits, name = match[1].replace(" ", ""), match[2] or match[3]
    base = int(name) if name.isdigit() else BASES.get(name, 0)
    if not 2 <= base <= 36 or not (digits[0].isdigit() or (base > 10 and len(digits) > 1)):
        return None
    if any(not each.isalnum() or int(each, 36) >= base for each in digits.replace(".", "", 1)):
        return None
    if base == 10:
        return Scalar(digits)
    return Numeral(digits.upper().lstrip("0") or "0", base)


READINGS = (
    *(_words, _residue, _assigned, _thousands, _listed, _related, _sets, _braced, _plus_minus, _bracketed),
    *(_ratio, _numeral),
)
"""Readings in the order in which they are tried: what separates most comes first."""


def split_signs(text: str, signs: str) -> tuple[list[str], list[str]]:
    """The parts between these signs where no bracket is open, and the signs."""
    parts, between, depth, start = [], [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in OPENING) - (sign in CLOSING)
        if depth == 0 and sign in signs:
            parts.append(text[start:place])
            between.append(sign)
            start = place + 1
    return [*parts, text[start:]], between


def split_list(text: str) -> tuple[list[str], set[str]]:
    """Members, and the words between them. A comma inside `1,234, 5` groups digits, as the other has a blank."""
    pieces, joints, depth, start = [], set(), 0, 0
    separators = {match.start(): match for match in SEPARATOR.finditer(text)}
    place = 0
    while place < len(text):
        match = separators.get(place)
        if depth == 0 and match:
            pieces.append(text[start:place])
            joints.add(match[1] or match[2] or ",")
            place = start = match.end()
            continue
        depth += (text[place] in OPENING) - (text[place] in CLOSING)
        place += 1
    pieces.append(text[start:])
    if joints == {","} and ", " in text:
        pieces = _regrouped(pieces)
    stripped = [piece.strip(" ,") for piece in pieces]
    return [piece for piece in stripped if piece] or [text], joints


def _regrouped(pieces: list[str]) -> list[str]:
    found = pieces[:1]
    for piece in pieces[1:]:
        if re.fullmatch(r"\d{3}(?:\.\d+)?", piece) and re.search(r"(?:^|[^\d.])\d{1,3}(?:,\d{3})*$", found[-1]):
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found
