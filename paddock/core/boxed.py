r"""Where LaTeX marks a final answer: `\boxed{...}`. Read from reference solutions and from answers in one way."""

from __future__ import annotations

import re


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, or the last `\fbox{...}` where nothing is boxed; `$\boxed 5$` holds `5`."""
    for command in (r"\boxed", r"\fbox"):
        start = text.rfind(command)
        if start >= 0:
            rest = text[start + len(command) :].lstrip()
            return _braced(rest) if rest.startswith("{") else _unbraced(rest)
    return None


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
