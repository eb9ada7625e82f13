r"""Answers to competition problems, compared as mathematics by math-verify: `\frac12` is `0.5`, `(1,2]` is not `[1,2]`.

math-verify's own time-outs are signals, which work only in a main thread and not while native code runs; they are off,
and these scorers run in a process that is killed instead.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from math_verify import parse, verify

from paddock.core.boxed import last_boxed
from paddock.rewards.rules import TAIL

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once a process that its time-outs are off

LONGEST = 1000  # characters; no final answer is longer, and parsers take time that grows faster than the text
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
STATED = re.compile(r"answers?\s*(?::|\bis\b|\bare\b)[:\s]*([^\n]+)", re.IGNORECASE)
NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?"
UNIT = r"(?:\s*(?:[cmk]m|kg|ft|mph|km/h)|\s+(?:m|g|mi|m/s))(?:\^\{?[23]\}?)?|\s+[A-Za-z]{3,}(?:\s[A-Za-z]+)*"
"""A short unit, or words after a space: `5x` and `5 xy` are products."""
QUANTITY = re.compile(rf"(?:\\?\$\s*)?(?P<number>{NUMBER})(?:\\?%|{UNIT})?", re.ASCII)
FRACTION = re.compile(r"(-?)(?:\\[dt]?frac(?:\{(-?\d+)\}\{(\d+)\}|(\d)(\d))|(\d+)/(\d+))", re.ASCII)
BRACKET_SIZE = re.compile(r"\\(?:left|right)(?=[()\[\]])\s*|(?<=[(\[])\s+|\s+(?=[)\]])")
DIGIT_SPACE = re.compile(r"(?<=\d)(?:,?\\[,!:; ]|\{,\})(?=\d{3})", re.ASCII)


def boxed(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    r"""1 if the last `\boxed{...}` equals the truth."""
    answer = last_boxed(solution_str)
    return float(answer is not None and equivalent(answer, str(ground_truth)))


def answer_line(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """+1 if the last `Answer: ...` near the end equals the truth, else -1.  DAPO, arXiv:2503.14476"""
    lines = ANSWER_LINE.findall(solution_str[-TAIL:])
    answer = (last_boxed(lines[-1]) or lines[-1]).strip() if lines else ""
    correct = bool(answer) and equivalent(answer, str(ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer}


def stated(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    r"""1 if the last `\boxed{...}` equals the truth, or, where nothing is boxed, the last `answer is ...`."""
    answer = last_boxed(solution_str)
    if answer is None:
        lines = STATED.findall(solution_str[-TAIL:])
        answer = lines[-1] if lines else ""
    return float(equivalent(answer, str(ground_truth)))


def thought_and_boxed(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, format_score: float = 0.1
) -> dict[str, Any]:
    r"""Mostly whether the last `\boxed{...}` is right, and a little whether it follows `<think>...</think>`."""
    answer = last_boxed(solution_str)
    correct = answer is not None and equivalent(answer, str(ground_truth))
    _, closed, after = solution_str.partition("</think>")
    in_format = solution_str.startswith("<think>") and bool(closed) and "}" in after.partition(r"\boxed{")[2]
    return {"score": (1.0 - format_score) * correct + format_score * in_format, "acc": correct, "format": in_format}


def equivalent(answer: str, truth: str) -> bool:
    """What can be told by the letters is; the rest is parsed, which takes a hundred times longer."""
    if len(answer) > max(LONGEST, 2 * len(truth)):
        return False
    answer, truth = _bare(answer), _bare(truth)
    if answer == truth or not answer:
        return bool(answer)
    numbers = quantity(answer), quantity(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    fractions = fraction(answer), fraction(truth)
    if None not in fractions:
        return fractions[0] == fractions[1]
    given, gold = members(answer), members(truth)
    if len(given) == len(gold) > 1 and (answer[0], answer[-1]) == (truth[0], truth[-1]):
        return all(map(equivalent, given, gold))
    expected, parsed = (parse(f"${text}$", parsing_timeout=None) for text in (truth, answer))
    return bool(verify(expected, parsed, timeout_seconds=None))


def quantity(text: str) -> Decimal | None:
    r"""The number in `1,234.50`, `\$18`, `50\%` and `12 cm`; None where more is to be understood."""
    found = QUANTITY.fullmatch(text)
    digits = found["number"].replace(",", "") if found else ""
    return Decimal(digits) if any(map(str.isdigit, digits)) else None


def fraction(text: str) -> Fraction | None:
    r"""`1/2`, `\frac12` and `-\dfrac{1}{2}`, of integers."""
    found = FRACTION.fullmatch(text)
    if not found:
        return None
    above, below = (digits for digits in found.groups()[1:] if digits)
    return Fraction(int(above), int(below)) * (-1 if found[1] else 1) if int(below) else None


def members(text: str) -> list[str]:
    """Of a pair or an interval, `(1, f(2, 3)]` -> `1`, `f(2, 3)`; nothing where the text is another thing."""
    if not (text.startswith(("(", "[")) and text.endswith((")", "]"))):
        return []
    depth, found = 0, [""]
    for letter in text[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:  # `(1, 2) \\cup (3, 4)`
            return []
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def _bare(text: str) -> str:
    r"""Without what surrounds an answer in prose, the size of brackets and spaces inside numbers:
    `**$\left(1{,}000,2\right)$.**` -> `(1000,2)`"""
    text = text.strip(" \t\n*").rstrip(".")
    while len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    return DIGIT_SPACE.sub("", BRACKET_SIZE.sub("", text)).strip()
