"""Scores by data source, under verl's name; the rules are `paddock.rewards.rules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paddock.errors import UserError
from paddock.facts.compat import of_checkouts
from paddock.rewards.rules import compute_score, scorer_of
from paddock.sandbox.program import default_settings

__path__ = [*__path__, *of_checkouts("utils/reward_score")]
"""Rules of a checkout's own are found behind ours: `verl.utils.reward_score.countdown` is its file."""


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
) -> float | dict[str, Any]:
    """A number, or a dict with `score`; NotImplementedError for a source without a rule.

    Programs run in the local sandbox, or by the service at `sandbox_fusion_url`, which counts calls at a time itself.
    """
    try:
        scorer = scorer_of(data_source)
    except UserError as error:
        raise NotImplementedError(str(error)) from None
    kwargs: dict[str, Any] = {}
    if scorer.sandboxed:
        settings = default_settings()
        limit = memory_limit_mb or settings.memory_limit_mb
        kwargs["sandbox"] = replace(settings, url=sandbox_fusion_url, memory_limit_mb=limit)
    return compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)


_default_compute_score = default_compute_score  # its name in verl's first releases

__all__ = ["default_compute_score"]
