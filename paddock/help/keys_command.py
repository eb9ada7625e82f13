"""`paddock keys`: finds keys by name and by meaning, and says everything that is known about one."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections import Counter

from paddock.config import tree
from paddock.errors import UserError
from paddock.help.entry import KeyEntry, commands_reading, entries, followers, set_elsewhere
from paddock.help.pages import PAGES
from paddock.help.show import width
from paddock.loading import foreign, trl

WHOLE, MOST = 3, 25
"""Up to so many keys are shown with all that is known, and up to so many on a line each."""
COMMON = list(dict.fromkeys(key for page in PAGES.values() for key in page.keys))
"""Keys that a page of help shows come before others that fit as well."""
WORD = re.compile(r"[a-z0-9]+")
LIKE = 0.8  # share of letters in which a misspelt word agrees


def run(arguments: list[str]) -> int:
    words = [word for argument in arguments for word in argument.split()]
    if flag := next((word for word in words if word.startswith("-")), None):
        raise UserError("is not a flag", key=flag, fix="paddock keys WORD [WORD ...]")
    print(overview() if not words else answer(words))
    return 0


def overview() -> str:
    """Sections with the number of their keys."""
    counts = Counter(section for key in entries() for section in parents(key))
    top = [section for section in counts if "." not in section]
    lines = [f"{len(entries())} keys in {len(top)} sections:"]
    for section in counts:
        if section.count(".") < 2:
            lines.append(f"{'  ' * (section.count('.') + 1)}{section:<46} {counts[section]:>4}")
    lines.append("paddock keys SECTION lists a section, paddock keys WORD finds by name and meaning.")
    return "\n".join(lines)


def parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))] or [key]


def answer(words: list[str]) -> str:
    name = words[0].strip(".").lstrip("+~").partition("=")[0] if len(words) == 1 else ""
    if name in tree.leaves():
        return whole(entries()[name])
    if name in tree.sections():
        inside = [entry for key, entry in entries().items() if key.startswith(f"{name}.")]
        return "\n".join([f"{len(inside)} keys in {name}:", *map(line, inside)])
    exact = [(name, rule)] if (rule := foreign.rule_for(name)) and name else []
    matches, every = search(words)
    others = exact or search_foreign(words)
    of_trl = trl.key_of(name) if name else None
    if not matches and not others and not of_trl:
        near = tree.meant(name) if name else []
        fix = f"did you mean {' or '.join(near)}?" if near else "fewer or other words; `paddock keys` lists sections"
        raise UserError("no key has this name or meaning", key="paddock keys", value=" ".join(words), fix=fix)
    parts = listing(matches, every, words) if matches and not exact else []
    if of_trl:
        said = f"{name} of TRL is {of_trl} here; docs/en/from_trl.md says which values it takes."
        parts[:0] = [said, whole(entries()[of_trl])]
    if others:
        parts.append("\n".join(["Keys of other systems:", *(becomes(key, rule) for key, rule in others[:MOST])]))
    return "\n\n".join(parts)


def listing(matches: list[KeyEntry], every: bool, words: list[str]) -> list[str]:
    if len(matches) <= WHOLE and every:
        return [whole(entry) for entry in matches]
    note = "" if every else f" (no key has all of: {' '.join(words)})"
    lines = [f"{len(matches)} keys{note}:", *map(line, matches[:MOST])]
    if len(matches) > MOST:
        lines.append(f"  and {len(matches) - MOST} more: add a word")
    return ["\n".join([*lines, "paddock keys KEY says all about one."])]


def search(words: list[str]) -> tuple[list[KeyEntry], bool]:
    """Keys by how well they fit, best first, and whether each fits every word; else those that fit some."""
    wanted = [word for text in words for word in WORD.findall(text.lower())]
    scores = {key: [fit(word, entry) for word in wanted] for key, entry in entries().items()}
    for every in (True, False):
        fitting = [key for key, points in scores.items() if points and (all if every else any)(points)]
        if fitting:
            ranked = sorted(fitting, key=lambda key: (-sum(scores[key]) - (key in COMMON), order(key)))
            return [entries()[key] for key in ranked], every
    return [], True


def order(key: str) -> tuple[int, int, str]:
    return COMMON.index(key) if key in COMMON else len(COMMON), key.count("."), key


def fit(word: str, entry: KeyEntry) -> float:
    """Returns how well a word fits a key: its last name most, then its path, then its meaning; a misspelt word a
    little."""
    last, path = WORD.findall(entry.key.rpartition(".")[2].lower()), WORD.findall(entry.key.lower())
    meaning = WORD.findall(f"{entry.meaning} {' '.join(entry.choices)}".lower())
    for score, pool in ((8.0, last), (5.0, path), (4.0, meaning)):
        if word in pool:
            return score
    if len(word) >= 3:
        for score, pool in ((6.0, last), (3.0, path), (2.5, meaning)):
            if any(other.startswith(word) or (len(word) >= 5 and word.startswith(other) and len(other) >= 4)
                   for other in pool):  # fmt: skip
                return score
    if len(word) >= 4 and word in entry.key.lower():
        return 2.0
    if len(word) >= 5 and difflib.get_close_matches(word, [*path, *meaning], n=1, cutoff=LIKE):
        return 1.0
    return 0.0


def search_foreign(words: list[str]) -> list[tuple[str, foreign.KeyRule]]:
    """Keys of other systems whose name holds every word."""
    return [(key, rule) for key, rule in foreign.rules().items() if all(word.lower() in key.lower() for word in words)]


def becomes(key: str, rule: foreign.KeyRule) -> str:
    match rule:
        case foreign.Mapped(to=to):
            return f"  {key}: is called {to} here"
        case foreign.Converted(to=to, about=about):
            return f"  {key}: becomes {to} ({about})"
        case foreign.Several(about=about):
            return f"  {key}: becomes other keys ({about})"
        case foreign.Ignored(why=why):
            return f"  {key}: ignored, {why}"
        case foreign.Refused(why=why, fix=fix, harmless=harmless):
            values = " or ".join("null" if value is None else str(value) for value in harmless)
            return f"  {key}: refused ({why}) unless it is {values}; fix: {fix}"
    raise AssertionError(rule)


def line(entry: KeyEntry) -> str:
    head = f"  {entry.key} = {entry.default.removeprefix('= ')}"
    return f"{head:<70} {entry.meaning}"


def whole(entry: KeyEntry) -> str:
    """All that is known about one key."""
    default = f"the value of {entry.default[2:]}" if entry.default.startswith("= ") else entry.default
    rows = [
        ("meaning", entry.meaning),
        ("default", "; ".join([default, *set_elsewhere(entry.key)])),
        ("type", entry.type),
        ("limits", entry.limits),
        ("names", ", ".join(entry.choices) if entry.choices and not entry.limits else ""),
        ("followed by", ", ".join(followers(entry.key))),
        ("commands", ", ".join(commands_reading(entry.key))),
    ]
    indent = " " * 15
    return "\n".join([entry.key, *(
        textwrap.fill(f"  {title:<12} {text}", width(), subsequent_indent=indent, break_long_words=False)
        for title, text in rows if text
    )])  # fmt: skip
