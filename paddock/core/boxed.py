r"""Where LaTeX marks a final answer: `\boxed{...}`. Read from reference solutions and from answers in one way."""

from __future__ import annotations

import re

JOINT = re.compile(
    r"[\s$]*(?:[,;&]|\\text\s*\{|\\quad|\b(?:and|or)\b|\})[\s$,;&{}]*(?:(?:and|or)\b)?[\s$},]*"
    r"(?:[A-Za-z]\w{0,3}\s*=\s*)?[\s$]*"
)
"""What stands between boxes that are one answer: `$\boxed{1}$ and $\boxed{2}$`, `x = \boxed{1}, y = \boxed{2}`."""

LONGEST_JOINT = 40  # characters


def last_boxed(text: str) -> str | None:
    r"""Returns what the last `\boxed{...}` holds, or the last `\fbox{...}` where nothing is boxed; `$\boxed 5$` holds
    `5`."""
    for command in (r"\boxed", r"\fbox"):
        start = text.rfind(command)
        if start >= 0:
            rest = text[start + len(command) :].lstrip()
            return _braced(rest) if rest.startswith("{") else _unbraced(rest)
    return None


def last_boxes(text: str) -> list[str]:
    r"""Returns what the last `\boxed{...}` holds, and those before it which only a comma or an `and` separates from
    it."""
    last = last_boxed(text)
    if last is None:
        return []
    found, start = [last], text.rfind(r"\boxed")
    while (before := text.rfind(r"\boxed{", 0, max(start, 0))) >= 0:
        inside = _braced(text[before + len(r"\boxed") : start])
        if inside is None:
            break
        between = text[before + len(r"\boxed{}") + len(inside) : start]
        if len(between) > LONGEST_JOINT or not JOINT.fullmatch(between):
            break
        found.insert(0, inside)
        start = before
    return found


def _braced(text: str) -> str | None:
    r"""`{a{b}} c` -> `a{b}`. An escaped brace, `\{`, is a character like any other."""
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0 and token.group() == "}":
            return text[1 : token.start()]
    return None


def _unbraced(text: str) -> str | None:
    formula = re.split(r"\$|\\\]|\\\)|\n", text, maxsplit=1)[0]
    return formula.strip().rstrip(".") or None
