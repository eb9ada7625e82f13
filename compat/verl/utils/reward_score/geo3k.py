r"""Geometry3K's rule in verl's signature: `<think>...</think>`, then `\boxed{...}`."""

from __future__ import annotations

from paddock.grading.verdicts import compared
from paddock.rewards.maths import thought_and_boxed
from paddock.rewards.score import checked


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """Mostly whether the answer is right, and a little its form; without `use_boxed` the whole text is the answer."""
    found = checked(thought_and_boxed(predict_str, str(ground_truth), format_score=format_score))
    if use_boxed:
        return found.value
    return (1.0 - format_score) * acc_reward(predict_str, ground_truth, False) + format_score * format_reward(
        predict_str
    )


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    if not use_boxed:
        return float(compared(predict_str, str(ground_truth)).equal)
    return float(checked(thought_and_boxed(predict_str, str(ground_truth))).extras["acc"])


def format_reward(predict_str: str) -> float:
    return float(checked(thought_and_boxed(predict_str, "0")).extras["format"])
