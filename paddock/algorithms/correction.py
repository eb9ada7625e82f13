"""Rollout correction: weights and rejections for samples of a policy that is not quite the one that trains.

Throughout, log_ratio = log pi_train - log pi_rollout, where pi_rollout is the engine that sampled. In decoupled mode
pi_train is the actor before the step's updates; in bypass mode it is the current actor, and the loss calls this module
itself. Weights and metrics are taken over the mask before rejection. Nothing here carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.algorithms.correction_metrics import BOUND, off_policy_metrics, rejection_metrics, weight_metrics
from paddock.config.rollout_correction import CorrectionPlan, Rejection, WeightLevel
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.masked import EPS, masked_mean, masked_sum


@dataclass(frozen=True, eq=False)
class Correction:
    weights: PerToken | None
    mask: PerToken
    metrics: dict[str, float]


@torch.no_grad()
def correct(batch: Batch, plan: CorrectionPlan) -> tuple[Batch, dict[str, float]]:
    """Fills `weights` and shrinks `mask` by the plan, pi_train being `old_log_probs`. Scores and rewards stay."""
    found = correction(batch.need("old_log_probs"), batch.need("rollout_log_probs"), batch.need("mask"), plan)
    return batch.with_(weights=found.weights, mask=found.mask), found.metrics


@torch.no_grad()
def correction(train: PerToken, rollout: PerToken, mask: PerToken, plan: CorrectionPlan) -> Correction:
    """Returns weights, new mask and metrics under their logged names; a batch without a valid token has no metrics."""
    if not bool((mask != 0).any()):
        return Correction(None if plan.weights is None else torch.zeros_like(train), mask, {})
    log_ratio = (train - rollout).masked_fill(mask == 0, 0)
    metrics = {f"rollout_corr/{name}": value for name, value in off_policy_metrics(train, rollout, mask).items()}
    weights, kept = None, mask
    if plan.weights is not None:
        weights, found = weigh(log_ratio, mask, plan)
        metrics |= {f"rollout_corr/rollout_is_{name}": value for name, value in found.items()}
    if plan.rejections:
        kept, found = reject(log_ratio, mask, plan.rejections)
        metrics |= {f"rollout_corr/rollout_rs_{name}": value for name, value in found.items()}
    return Correction(weights, kept, {name: float(value) for name, value in metrics.items()})


def weigh(log_ratio: PerToken, mask: PerToken, plan: CorrectionPlan) -> tuple[PerToken, dict[str, Tensor]]:
    """Returns the plan's importance weights and their metrics, which describe the weights before batch
    normalisation."""
    weights = truncated_weights(log_ratio, mask, plan)
    metrics = weight_metrics(log_ratio, importance_ratios(log_ratio, mask, plan.weights), weights, mask, plan)
    if plan.batch_normalize:
        factor = batch_norm_factor(weights, mask, plan.weights)
        weights = weights / factor
        metrics["batch_norm_factor"] = factor
    return weights, metrics


def truncated_weights(log_ratio: PerToken, mask: PerToken, plan: CorrectionPlan) -> PerToken:
    """Returns the plan's importance weights before batch normalisation.

    TIS, w = min(v, high); with a lower bound IcePop, w = v inside [low, high] and 0 outside (the mask stays).
    """
    ratios = importance_ratios(log_ratio, mask, plan.weights)
    if plan.low is None:
        return ratios.clamp(max=plan.high)
    return ratios.masked_fill((ratios < plan.low) | (ratios > plan.high), 0)


def importance_ratios(log_ratio: PerToken, mask: PerToken, level: WeightLevel | None) -> PerToken:
    """token: v_t = exp(log_ratio_t); sequence: exp(sum_t log_ratio) on each token of the row; 0 outside the mask."""
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, -1).unsqueeze(-1).expand_as(log_ratio)
    return log_ratio.clamp(-BOUND, BOUND).exp().masked_fill(mask == 0, 0)


def batch_norm_factor(weights: PerToken, mask: PerToken, level: WeightLevel | None) -> Tensor:
    """Returns the mean weight of the valid tokens, or of the rows that have any; 1 if it vanishes."""
    valid = mask != 0
    if level == "token":
        total, count = weights.sum(), valid.sum()
    else:
        total, count = masked_mean(weights, mask, -1).sum(), valid.any(-1).sum()
    factor = (total.double() / count.double().clamp(min=1)).to(weights.dtype)
    return torch.where(factor > EPS, factor, torch.ones_like(factor))


def reject(
    log_ratio: PerToken, mask: PerToken, rejections: tuple[Rejection, ...]
) -> tuple[PerToken, dict[str, Tensor]]:
    """Returns the mask of the tokens that every option keeps, and the metrics of each option and of all together."""
    metrics: dict[str, Tensor] = {}
    for option in rejections:
        statistic, row_statistic = statistics(log_ratio, mask, option)
        found = rejection_metrics(statistic, row_statistic, within(statistic, option), mask, option)
        metrics |= {f"{option.option}_{name}": value for name, value in found.items()}
    kept = kept_mask(log_ratio, mask, rejections)
    lost = (mask != 0) & (kept == 0)
    metrics["masked_fraction"] = masked_mean(lost.float(), mask)
    metrics["seq_masked_fraction"] = lost.any(-1).float().mean()
    return kept, metrics


def kept_mask(log_ratio: PerToken, mask: PerToken, rejections: tuple[Rejection, ...]) -> PerToken:
    """Returns the mask without the tokens that any option rejects."""
    kept = mask
    for option in rejections:
        kept = kept.masked_fill(~within(statistics(log_ratio, mask, option)[0], option), 0)
    return kept


def within(statistic: PerToken, option: Rejection) -> Tensor:
    keeps = statistic <= option.high
    return keeps if option.low is None else keeps & (statistic >= option.low)


def statistics(log_ratio: PerToken, mask: PerToken, option: Rejection) -> tuple[PerToken, PerRow]:
    """Returns the statistic that an option bounds, per token and per row: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l, with
    l = log_ratio.

    k1's sign makes its band "lo_hi" bound pi_rollout / pi_train: with "0.1_1.2" the ratio pi_train / pi_rollout stays
    within [1/1.2, 1/0.1]. Thresholds in use elsewhere are read this way, so they keep their meaning here.
    A token option's row statistic is the mean over the row's tokens.
    """
    bounded = log_ratio.clamp(-BOUND, BOUND)
    token = {
        "k1": lambda: -bounded,
        "k2": lambda: bounded.square() / 2,
        "k3": lambda: torch.expm1(bounded) - bounded,
    }[option.kind]()
    if option.level == "token":
        return token, masked_mean(token, mask, -1)
    if option.level == "seq_sum":
        row = masked_sum(token, mask, -1)
    elif option.level == "seq_mean":
        row = masked_mean(token, mask, -1)
    else:  # k2 and k3 are never negative, so padding at 0 leaves the maximum alone
        row = token.masked_fill(mask == 0, 0).amax(-1)
    return row.unsqueeze(-1).expand_as(token), row
