"""Scores by data source, under verl's name; the rules are `paddock.rewards.rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddock.errors import UserError
from paddock.rewards.rules import compute_score, scorer_of


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
) -> float | dict[str, Any]:
    """A number, or a dict with `score`; NotImplementedError for a source without a rule. No rule needs a sandbox."""
    try:
        scorer_of(data_source)
    except UserError as error:
        raise NotImplementedError(str(error)) from None
    return compute_score(data_source, solution_str, ground_truth, extra_info)


__all__ = ["default_compute_score"]
