"""DAPO's rule for mathematics in verl's signature."""

from __future__ import annotations

from typing import Any

from paddock.core.boxed import last_boxed
from paddock.rewards.maths import answer_line, boxed
from paddock.rewards.score import Score


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    r"""+1 or -1 for `Answer: ...`, or with `strict_box_verify` for `\boxed{...}`; with `acc` and `pred`."""
    if not strict_box_verify:
        found = answer_line(solution_str, str(ground_truth))
        return {"score": found.value, **found.extras} if isinstance(found, Score) else found
    verdict = boxed(solution_str, str(ground_truth))
    right = (verdict.value if isinstance(verdict, Score) else verdict) == 1.0
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": last_boxed(solution_str)}
