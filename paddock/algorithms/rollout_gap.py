"""How far the probabilities of sampled tokens differ between the rollout engine (q) and the trainer (p).

A step that computes no `old_log_probs` meets p only inside its update, micro-batch by micro-batch and rank by rank.
`gap_shares` gives each micro-batch's share of the moments; shares add up (the maximum: the largest counts), and
`gap_metrics` turns their totals into the metrics that `trainer/metrics.mismatch` computes from a whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paddock.algorithms.correction_metrics import BOUND
from paddock.core.batch import PerToken
from paddock.core.masked import Denominators, aggregate

MEAN, MAX = "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"
MOMENTS = ("gap_squared", "p", "q", "p_squared", "q_squared", "p_q")
RATIO, RATIO_SQUARED = "moment/ratio", "moment/ratio_squared"
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


@torch.no_grad()
def lag_shares(trained: PerToken, drawn: PerToken, mask: Tensor, denominators: Denominators) -> dict[str, Tensor]:
    """Returns one micro-batch's share of how far the policy p is from the weights q that drew its tokens: ``E r`` and
    ``E r^2`` with r = p / q, and KL(q | p) by the estimates k1 and k3."""
    z = (trained.detach() - drawn).masked_fill(mask == 0, 0).double()
    ratio = z.clamp(-BOUND, BOUND).exp()
    columns = {RATIO: ratio, RATIO_SQUARED: ratio.square(), "rollout_corr/kl": -z, "rollout_corr/k3_kl": z.expm1() - z}
    return {name: aggregate(x, mask, "token-mean", denominators) for name, x in columns.items()}


def gap_metrics(totals: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Returns the metrics with the moments of `gap_shares` replaced by standard deviation and correlation, and those of
    `lag_shares` by the effective sample size, as a share of the tokens: ``(E r)^2 / E r^2``.

    ``std = sqrt((E g^2 - (E g)^2) T / (T - 1))``, ``corr = cov(p, q) / sqrt(var p var q)``; probabilities that do not
    vary correlate only if they are equal.
    """
    found = {name: value for name, value in totals.items() if not name.startswith("moment/")}
    if totals.get(RATIO_SQUARED):
        found["training/off_policy/ess"] = totals[RATIO] ** 2 / totals[RATIO_SQUARED]
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
