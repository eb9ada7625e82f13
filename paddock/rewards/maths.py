r"""Answers to competition problems, compared as mathematics by math-verify: `\frac12` is `0.5`, `(1,2]` is not `[1,2]`.

math-verify's own time-outs are signals, which work only in a main thread and not while native code runs; they are off,
and these scorers run in a process that is killed instead.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import parse, verify

from paddock.rewards.rules import TAIL, number

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once a process that its time-outs are off

LONGEST = 1000  # characters; no final answer is longer, and parsers take time that grows faster than the text
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


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


def equivalent(answer: str, truth: str) -> bool:
    answer, truth = _bare(answer), _bare(truth)
    if answer == truth:
        return bool(truth)
    if len(answer) > max(LONGEST, 2 * len(truth)):
        return False
    numbers = number(answer), number(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    gold, given = (parse(f"${text}$", parsing_timeout=None) for text in (truth, answer))
    return bool(verify(gold, given, timeout_seconds=None))


def _bare(text: str) -> str:
    r"""Without what surrounds an answer in prose: `**$\frac12$.**` -> `\frac12`"""
    text = text.strip(" \t\n*").rstrip(".")
    while len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    return text


def last_boxed(text: str) -> str | None:
    r"""What the last closed `\boxed{...}` holds: `\boxed{a{b}} c` -> `a{b}`. An escaped brace counts as a character."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text[start + len(r"\boxed") :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : start + len(r"\boxed") + token.start()]
    return None
