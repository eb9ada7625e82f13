"""GSM8K's rule in verl's signature."""

from __future__ import annotations

import re
from typing import Any

from paddock.rewards.rules import GSM8K, MONEY, gsm8k


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if the answer is right, `format_score` if there is another one, else 0."""
    if gsm8k(solution_str, ground_truth, method=method):
        return score
    return format_score if extract_solution(solution_str, method) is not None else 0.0


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Returns the answer without commas and dollar signs; None if there is none."""
    found = re.findall(GSM8K[method].format(MONEY), solution_str)
    return found[-1].replace(",", "").replace("$", "") if found else None
