r"""Answers to competition problems, compared as mathematics: `\frac12` is `0.5`, `(1,2]` is not `[1,2]`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from paddock.core.boxed import last_boxed, last_boxes
from paddock.grading.verdicts import Verdict, compared
from paddock.rewards.rules import TAIL, as_verl, texts_of
from paddock.rewards.score import Score, checked
from paddock.rewards.verl_verdicts import same_text

ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
STATED = re.compile(r"answers?\s*(?::|\bis\b|\bare\b)[:\s]*([^\n]+)", re.IGNORECASE)
WRONG = Verdict(False)


def boxed(solution_str: str, ground_truth: Any) -> float | Score:
    r"""1 if the last `\boxed{...}` equals the truth."""
    verdict = _boxed_verdict(solution_str, ground_truth)
    return _unless_undecided(float(verdict.equal), verdict)


def answer_line(solution_str: str, ground_truth: Any, verdicts: str = "paddock") -> dict[str, Any] | Score:
    """+1 if the last `Answer: ...` near the end, or without such a line the last box there, equals the truth, else -1.
    DAPO, arXiv:2503.14476"""
    end = solution_str[-TAIL:]
    lines = ANSWER_LINE.findall(end)
    if as_verl(verdicts):
        answer = lines[-1] if lines else last_boxed(end) or ""
        verdict = Verdict(bool(answer) and any(same_text(answer, truth) for truth in texts_of(ground_truth)))
    else:
        answer = ((last_boxed(lines[-1]) or lines[-1]) if lines else last_boxed(end) or "").strip()
        verdict = _compared(answer, ground_truth)
    score = {"score": 1.0 if verdict.equal else -1.0, "acc": verdict.equal, "pred": answer}
    return _unless_undecided(score, verdict)


def stated(solution_str: str, ground_truth: Any) -> float | Score:
    r"""1 if the last `\boxed{...}` equals the truth, or, if nothing is boxed, the last `answer is ...`."""
    if last_boxed(solution_str) is None:
        answer, rest = "", solution_str[-TAIL:]
        while match := STATED.search(rest):  # also within the line that follows the one before
            answer = match[1]
            rest = rest[match.start(1) :]
        verdict = _compared(answer, ground_truth)
    else:
        verdict = _boxed_verdict(solution_str, ground_truth)
    return _unless_undecided(float(verdict.equal), verdict)


def thought_and_boxed(solution_str: str, ground_truth: Any, format_score: float = 0.1) -> dict[str, Any] | Score:
    r"""Mostly whether the last `\boxed{...}` is right, and a little whether it follows `<think>...</think>`."""
    verdict = _boxed_verdict(solution_str, ground_truth)
    _, closed, after = solution_str.partition("</think>")
    in_format = solution_str.startswith("<think>") and bool(closed) and "}" in after.partition(r"\boxed{")[2]
    score = (1.0 - format_score) * verdict.equal + format_score * in_format
    return _unless_undecided({"score": score, "acc": verdict.equal, "format": in_format}, verdict)


def _boxed_verdict(response: str, truth: Any) -> Verdict:
    r"""The last box counts; `\boxed{1} and \boxed{2}` counts as `1, 2` too."""
    boxes = last_boxes(response)
    verdict = _compared(boxes[-1] if boxes else "", truth)
    return verdict if verdict.equal or len(boxes) < 2 else _compared(", ".join(boxes), truth)


def _compared(answer: str, ground_truth: Any) -> Verdict:
    """The verdict by the ground truth; by the best of them, if it is a list. A row without one is no row to score."""
    truths = texts_of(ground_truth)
    verdicts = [compared(answer, truth) for truth in truths] if answer else [WRONG]
    return next((each for each in verdicts if each.equal), max(verdicts, key=lambda each: each.undecided))


def _unless_undecided(score: Any, verdict: Verdict) -> Any:
    """Returns the score; as a Score that counts as cut off if the comparison was given up."""
    return replace(checked(score), timed_out=True, undecided=True) if verdict.undecided else score
