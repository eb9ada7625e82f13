"""Scorers by `data_source`, and those that are a few lines of text matching. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from typing import Any

from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.rewards.custom import MODULE, Target, load
from paddock.rewards.score import ScoreRequest

TAIL = 300  # characters of the response in which the final answer must stand


@dataclass(frozen=True)
class Scorer:
    """Where the function is, and what the manager must know of it."""

    target: Target
    pooled: bool = True
    """In a process that can be killed. False for a function that cannot hang and costs less than the way there and
    back, about 60 microseconds."""
    failed: float = 0.0
    """The score of a response whose scoring was cut off."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> Any:
    """The score that the rule for this source gives: a number, or a dict with `score` and more."""
    score = load(scorer_of(data_source).target)(ScoreRequest(data_source, solution_str, ground_truth, extra_info or {}))
    return {"score": score.value, **score.extras} if score.extras else score.value


def scorer_of(data_source: str) -> Scorer:
    for pattern, scorer in SCORERS.items():
        if fnmatchcase(data_source, pattern):
            return scorer
    raise UserError(
        "no scorer is known for this source",
        key="data_source",
        value=data_source,
        fix=f"{suggest(data_source, list(SCORERS))}; or score all rows by custom_reward_function.path=my_reward.py, "
        "with def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0",
    )


def addition(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str.strip() == ground_truth)


def gsm8k(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, method: str = "strict"
) -> float:
    """1 if the last `#### number` is the true one; `flexible` takes the last number, marked or not."""
    patterns = {"strict": r"####\s*\$?(-?[\d.,]*\d)", "flexible": r"(-?[\d.,]*\d)"}
    found = re.findall(patterns[method], solution_str[-TAIL:])
    truth = number(str(ground_truth))
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    return float(bool(found) and number(found[-1]) == truth)


def number(text: str) -> Decimal | None:
    """`1,234.50` -> 1234.5"""
    try:
        return Decimal(text.strip().replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def _rule(name: str, module: str = "rules", pooled: bool = False, failed: float = 0.0) -> Scorer:
    return Scorer(Target(f"{MODULE}paddock.rewards.{module}", name), pooled, failed)


_BOXED = _rule("boxed", "maths", pooled=True)
_DAPO = _rule("answer_line", "maths", pooled=True, failed=-1.0)

SCORERS: dict[str, Scorer] = {
    "paddock/addition": _rule("addition"),
    "openai/gsm8k": _rule("gsm8k"),
    "lighteval/MATH": _BOXED,
    "DigitalLearningGmbH/MATH-lighteval": _BOXED,
    "HuggingFaceH4/MATH-500": _BOXED,
    "math_dapo": _DAPO,
    "math": _DAPO,
    "math_dapo_reasoning": _DAPO,
    "aime*": _DAPO,
}
