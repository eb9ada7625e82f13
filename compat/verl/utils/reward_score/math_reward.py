r"""The rule for MATH in verl's signature: the last `\boxed{...}`, compared as mathematics."""

from __future__ import annotations

from typing import Any

from paddock.core.boxed import last_boxed
from paddock.rewards.maths import boxed
from paddock.rewards.score import checked


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1 if the last box equals the truth, else 0."""
    return checked(boxed(solution_str, str(ground_truth))).value


def last_boxed_only_string(string: str) -> str | None:
    r"""Returns the last `\boxed{...}`, with its box."""
    found = last_boxed(string)
    return None if found is None else f"\\boxed{{{found}}}"


def remove_boxed(s: str) -> str | None:
    """Returns what is inside of a box."""
    return last_boxed(s)
