"""How far the probabilities of sampled tokens differ between the rollout engine (q) and the trainer (p).

A step that computes no `old_log_probs` meets p only inside its update, micro-batch by micro-batch and rank by rank.
`gap_shares` gives each micro-batch's share of the moments; shares add up (the maximum: the largest counts), and
`gap_metrics` turns their totals into the metrics that `trainer/metrics.mismatch` computes from a whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paddock.core.batch import PerToken
from paddock.core.masked import Denominators, aggregate

MEAN, MAX = "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"
MOMENTS = ("gap_squared", "p", "q", "p_squared", "q_squared", "p_q")
CONSTANT = 1e-14
"""Variance of probabilities below which rounding makes up all of it."""


@torch.no_grad()
def gap_shares(trained: PerToken, sampled: PerToken, mask: Tensor, denominators: Denominators) -> dict[str, Tensor]:
    """Returns one micro-batch's share of ``E|p - q|``, of its maximum, and of the second moments of p and q."""
    p, q = (x.detach().masked_fill(mask == 0, 0).double().exp() for x in (trained, sampled))
    gap = (p - q).abs()
    columns = (gap.square(), p, q, p.square(), q.square(), p * q)
    shares = {f"moment/{name}": x for name, x in zip(MOMENTS, columns, strict=True)} | {MEAN: gap}
    found = {name: aggregate(x, mask, "token-mean", denominators) for name, x in shares.items()}
    return found | {MAX: gap.masked_fill(mask == 0, 0).max()}


def gap_metrics(totals: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Returns the metrics with the moments of `gap_shares` replaced by standard deviation and correlation.

    ``std = sqrt((E g^2 - (E g)^2) T / (T - 1))``, ``corr = cov(p, q) / sqrt(var p var q)``; probabilities that do not
    vary correlate only if they are equal.
    """
    found = {name: value for name, value in totals.items() if not name.startswith("moment/")}
    if MEAN not in totals:
        return found
    squared, p, q, pp, qq, pq = (totals[f"moment/{name}"] for name in MOMENTS)
    variance = max(squared - totals[MEAN] ** 2, 0.0) * tokens / max(tokens - 1, 1.0)
    var_p, var_q = pp - p * p, qq - q * q
    varies = min(var_p, var_q) > CONSTANT
    return found | {
        "training/rollout_probs_diff_valid": float(tokens > 0),
        "training/rollout_probs_diff_std": variance**0.5,
        "training/rollout_actor_probs_pearson_corr": (
            (pq - p * q) / (var_p * var_q) ** 0.5 if varies else float(totals[MAX] == 0)
        ),
    }
