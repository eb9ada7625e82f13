r"""Verdicts as verl's rules give them: texts that are equal, not numbers or mathematics: `18.` is not `18`.

The notation that `math_dapo` forgives is Minerva's list (arXiv:2206.14858, appendix D.1).
"""

from __future__ import annotations

import re

NUMBER = r"(-?[0-9.,]+)"
NOUNS = """square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees
cm gm pounds meters meals edges students childrentickets multiples"""
MARKS = (
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
    *((word, "") for word in (*NOUNS.split(), *MARKS)),
)
"""Texts and what replaces them, in this order."""
REWRITTEN = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    *((rf"\\{name}\{{(.*?)\}}", r"\1") for name in ("text", "textbf", "overline")),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
)


def stated_number(response: str, method: str, truth: str) -> bool:
    """True if the last `#### number`, or with `flexible` the last number, is written as the truth is."""
    if method == "strict":
        numbers = [text.replace(",", "") for text in re.findall(f"#### {NUMBER}", response)]
    else:
        numbers = [text for text in re.findall(NUMBER, response) if text != "."]
    return bool(numbers) and numbers[-1] == truth


def same_text(answer: str, truth: str) -> bool:
    """True if both are one text without the words and marks that do not count."""
    return _plain(answer) == _plain(truth)


def _plain(text: str) -> str:
    text = text.split("=")[-1]
    for before, after in REPLACED:
        text = text.replace(before, after)
    for pattern, after in REWRITTEN:
        text = re.sub(pattern, after, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()
