"""Search-R1's rule in verl's signature: the last `<answer>`, but for case, articles and punctuation."""

from __future__ import annotations

from typing import Any

from paddock.rewards.rules import tagged_answer


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for a right answer, a quarter of it among many tags, and `format_score` for another answer."""
    right = tagged_answer(solution_str, ground_truth, format_score=0.0)
    return score * right if right else tagged_answer(solution_str, ground_truth, format_score=format_score)
