"""How far the policy that samples and the policy that trains lie apart, and what the correction did about it.

Means are over the valid tokens of the batch unless a row is named; "rows" are all rows in the off-policy and weight
metrics, and the rows with a valid token in the rejection metrics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paddock.config.rollout_correction import CorrectionPlan, Rejection
from paddock.core.batch import PerRow, PerToken
from paddock.core.masked import EPS, masked_mean, masked_sum

BOUND = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated."""


@torch.no_grad()
def off_policy_metrics(train: PerToken, rollout: PerToken, mask: PerToken) -> dict[str, Tensor]:
    """Perplexities of both policies on the sampled rows, KL(pi_rollout | pi_train) by k1 and k3, and chi-square."""
    log_ratio = (train - rollout).masked_fill(mask == 0, 0)
    train_mean, rollout_mean = masked_mean(train, mask, -1), masked_mean(rollout, mask, -1)
    gap = rollout_mean - train_mean
    row_log_ratio = masked_sum(log_ratio, mask, -1)
    return {
        "training_ppl": torch.exp(-train_mean).mean(),
        "training_log_ppl": -train_mean.mean(),
        "rollout_ppl": torch.exp(-rollout_mean).mean(),
        "rollout_log_ppl": -rollout_mean.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, mask),
        "chi2_token": masked_mean(torch.exp(2 * log_ratio.clamp(-BOUND, BOUND)), mask) - 1,
        "chi2_seq": torch.exp(2 * row_log_ratio.clamp(-BOUND, BOUND)).mean() - 1,
    }


def weight_metrics(
    log_ratio: PerToken, ratios: PerToken, weights: PerToken, mask: PerToken, plan: CorrectionPlan
) -> dict[str, Tensor]:
    """Returns metrics of the weights w (truncated) and ratios v (not); names lack the prefix `rollout_is_`."""
    high = plan.high
    low = 1 / high if plan.low is None else plan.low
    valid = mask != 0
    mean = masked_mean(weights, mask)
    share = masked_mean((weights / (mean + EPS)).square(), mask)
    row_mean, row_ratio = masked_mean(weights, mask, -1), masked_mean(ratios, mask, -1)
    metrics = {
        "mean": mean,
        "std": spread(weights, mask),
        "eff_sample_size": torch.where(share > 0, 1 / share, torch.zeros_like(share)),
        "seq_mean": row_mean.mean(),
        "seq_std": deviation(row_mean),
        "seq_max": row_mean.max(),
        "seq_min": row_mean.min(),
        "seq_max_deviation": (row_mean - 1).abs().max(),
        "seq_fraction_high": (row_ratio > high).float().mean(),
        "seq_fraction_low": (row_ratio < low).float().mean(),
    }
    if plan.weights == "token":
        metrics |= {
            "max": weights[valid].max(),
            "min": weights[valid].min(),
            "ratio_fraction_high": masked_mean((ratios > high).float(), mask),
            "ratio_fraction_low": masked_mean((ratios < low).float(), mask),
        }
    else:
        row_log_ratio = masked_sum(log_ratio, mask, -1)
        metrics |= {
            "max": row_log_ratio.max().clamp(max=BOUND).exp(),
            "min": row_log_ratio.min().exp(),
            "ratio_fraction_high": (row_log_ratio > math.log(high)).float().mean(),
            "ratio_fraction_low": (row_log_ratio < math.log(low)).float().mean(),
        }
    if plan.low is not None:
        metrics["oob_ratio"] = masked_mean(((ratios < plan.low) | (ratios > high)).float(), mask)
    return metrics


def rejection_metrics(
    statistic: PerToken, row_statistic: PerRow, keeps: PerToken, mask: PerToken, option: Rejection
) -> dict[str, Tensor]:
    """Returns metrics of one option's statistic x, which a row option repeats on each token; names lack the prefix."""
    valid = mask != 0
    rows = row_statistic[valid.any(-1)]
    spot = statistic[valid] if option.level == "token" else rows
    floor = 0.0 if option.low is None else option.low
    lost = valid & ~keeps

    def below(x: Tensor) -> Tensor:
        return x.new_zeros(()) if option.low is None else (x < option.low).float().mean()

    metrics = {
        "mean": masked_mean(statistic, mask),
        "std": spread(statistic.clamp(floor, option.high), mask),
        "max": spot.max(),
        "min": spot.min(),
        "fraction_high": (spot > option.high).float().mean(),
        "fraction_low": below(spot),
        "seq_mean": rows.mean(),
        "seq_std": deviation(rows),
        "seq_max": rows.max(),
        "seq_min": rows.min(),
        "seq_max_deviation": rows.abs().max(),
        "seq_fraction_high": (rows > option.high).float().mean(),
        "masked_fraction": masked_mean(lost.float(), mask),
        "seq_masked_fraction": lost.any(-1)[valid.any(-1)].float().mean(),
    }
    if option.low is not None:
        metrics["seq_fraction_low"] = below(rows)
    return metrics


def spread(x: PerToken, mask: PerToken) -> Tensor:
    """Biased standard deviation over the valid tokens; 0 for a single one."""
    return masked_mean((x - masked_mean(x, mask)).square(), mask).sqrt()


def deviation(rows: PerRow) -> Tensor:
    """Standard deviation with n-1; 0 for a single row."""
    return rows.std() if len(rows) > 1 else rows.new_zeros(())
