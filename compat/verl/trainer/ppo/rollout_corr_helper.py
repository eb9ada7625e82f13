"""Rollout correction under verl's names; the formulas are `paddock.algorithms.correction`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from paddock.algorithms.correction import correction, reject, weigh
from paddock.algorithms.correction_metrics import BOUND, off_policy_metrics, weight_metrics
from paddock.config.rollout_correction import REJECTION_OPTIONS, CorrectionPlan, WeightLevel, parse
from paddock.core.batch import PerToken
from verl._errors import BadValue, raises_value_errors, require_no_boolean
from verl.protocol import DataProto
from verl.trainer.ppo._view import View

SUPPORTED_ROLLOUT_RS_OPTIONS = frozenset(REJECTION_OPTIONS)
TOKEN_LEVEL_ROLLOUT_RS_OPTIONS = frozenset(option for option in REJECTION_OPTIONS if option.startswith("token_"))


@torch.no_grad()
@raises_value_errors
def compute_rollout_correction_weights(
    log_ratio: PerToken,
    response_mask: PerToken,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[PerToken, dict[str, float]]:
    """Importance weights, and their metrics named `rollout_is_...`."""
    options = {
        "rollout_is": rollout_is,
        "rollout_is_threshold": rollout_is_threshold,
        "rollout_is_batch_normalize": rollout_is_batch_normalize,
    }
    weights, metrics = weigh(log_ratio.masked_fill(response_mask == 0, 0), response_mask, parse(View(options)))
    return weights, {f"rollout_is_{name}": float(value) for name, value in metrics.items()}


@torch.no_grad()
@raises_value_errors
def compute_rollout_rejection_mask(
    log_ratio: PerToken,
    response_mask: PerToken,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[PerToken, dict[str, float]]:
    """The mask after rejection, and metrics named `rollout_rs_...`."""
    plan = parse(View({"rollout_rs": rollout_rs, "rollout_rs_threshold": rollout_rs_threshold}))
    kept, metrics = reject(log_ratio.masked_fill(response_mask == 0, 0), response_mask, plan.rejections)
    return kept, {f"rollout_rs_{name}": float(value) for name, value in metrics.items()}


@torch.no_grad()
def compute_is_metrics(
    rollout_is_weights: PerToken,
    raw_rollout_is_weights: PerToken,
    log_ratio_for_metrics: Tensor,
    response_mask: PerToken,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """Metrics of truncated weights, named `rollout_is_...`. A log-ratio of rows may stand on each of their tokens."""
    if not bool((response_mask != 0).any()):
        raise BadValue("has no valid token", key="response_mask")
    level: WeightLevel = "sequence" if rollout_is == "sequence" else "token"
    plan = CorrectionPlan(weights=level, low=rollout_is_threshold_lower, high=rollout_is_threshold)
    unused = torch.zeros_like(rollout_is_weights)
    found = weight_metrics(unused, raw_rollout_is_weights, rollout_is_weights, response_mask, plan)
    found.pop("oob_ratio", None)
    if level == "sequence":
        rows = log_ratio_for_metrics.flatten()
        low = 1 / plan.high if plan.low is None else plan.low
        found |= {
            "max": rows.max().clamp(max=BOUND).exp(),
            "min": rows.min().exp(),
            "ratio_fraction_high": (rows > math.log(plan.high)).float().mean(),
            "ratio_fraction_low": (rows < math.log(low)).float().mean(),
        }
    return {f"rollout_is_{name}": float(value) for name, value in found.items()}


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: PerToken, rollout_log_prob: PerToken | None, response_mask: PerToken
) -> dict[str, float]:
    """Perplexities and divergences; without the rollout's log-probs the trained policy's perplexity alone."""
    if not bool((response_mask != 0).any()):
        raise BadValue("has no valid token", key="response_mask")
    rollout = old_log_prob if rollout_log_prob is None else rollout_log_prob
    found = off_policy_metrics(old_log_prob, rollout, response_mask)
    alone = rollout_log_prob is None
    return {name: float(value) for name, value in found.items() if not alone or name.startswith("training_")}


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: PerToken, rollout_log_prob: PerToken, response_mask: PerToken
) -> dict[str, float]:
    found = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in found.items()}


@raises_value_errors
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: PerToken,
    rollout_log_prob: PerToken,
    response_mask: PerToken,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[Any, PerToken, dict[str, float]]:
    """`(weights, mask, metrics)`; weights are None, or hold the matrix as `.batch["rollout_is_weights"]`."""
    require_no_boolean(rollout_is_threshold=rollout_is_threshold, rollout_rs_threshold=rollout_rs_threshold)
    options = {
        "rollout_is": rollout_is,
        "rollout_is_threshold": rollout_is_threshold,
        "rollout_is_batch_normalize": rollout_is_batch_normalize,
        "rollout_rs": rollout_rs,
        "rollout_rs_threshold": rollout_rs_threshold,
    }
    found = correction(old_log_prob, rollout_log_prob, response_mask, parse(View(options)))
    weights = None if found.weights is None else DataProto.from_dict(tensors={"rollout_is_weights": found.weights})
    return weights, found.mask, found.metrics


@raises_value_errors
def compute_rollout_correction_and_add_to_batch(batch: Any, rollout_corr_config: Any) -> tuple[Any, dict[str, float]]:
    """Replace `response_mask` and add `rollout_is_weights` in `batch.batch`, any mapping of columns."""
    columns = batch.batch
    found = correction(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        columns["response_mask"],
        parse(View(rollout_corr_config)),
    )
    columns["response_mask"] = found.mask
    if found.weights is not None:
        columns["rollout_is_weights"] = found.weights
    return batch, found.metrics


def apply_bypass_mode(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """Let the rollout policy stand for the old one, and choose the loss that corrects inside itself."""
    if "rollout_log_probs" not in batch.batch:
        raise ValueError("bypass mode needs rollout_log_probs: let the rollout engine calculate them")
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    choices = {"rollout_correction": rollout_corr_config, "loss_mode": "bypass_mode"}
    with unlocked(policy_loss_config):
        for name, value in choices.items():
            if isinstance(policy_loss_config, Mapping):
                policy_loss_config[name] = value  # type: ignore[index]
            else:
                setattr(policy_loss_config, name, value)


def unlocked(config: Any) -> Any:
    """An OmegaConf node takes new keys only when it is opened; anything else takes them as it is."""
    from omegaconf import OmegaConf, open_dict

    return open_dict(config) if OmegaConf.is_config(config) else nullcontext()
