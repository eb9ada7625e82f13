r"""The rule of math_verify in verl's signature: the last `\boxed{...}`, compared as mathematics."""

from __future__ import annotations

from paddock.rewards.maths import boxed
from paddock.rewards.score import checked


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0) -> float:
    """1 if the last box equals the truth; `timeout_score` if the comparison gave up, within limits of its own."""
    found = checked(boxed(model_output, str(ground_truth)))
    return timeout_score if found.undecided else found.value
