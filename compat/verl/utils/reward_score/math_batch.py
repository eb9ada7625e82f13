"""The rule for MATH for several answers at a time, in verl's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score.math_reward import compute_score


def compute_score_batched(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any], extra_infos: Sequence[Any]
) -> list[float]:
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]
