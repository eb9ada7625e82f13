"""Paddock's formulas under verl's names and call conventions, and registries for plug-ins written for verl.

Every formula lives in `paddock.algorithms`; here arguments are renamed, configs of any kind are read, and results are
handed back in the shapes that callers expect. A plug-in registered here also serves Paddock's own trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paddock.algorithms import losses
from paddock.algorithms.correction import correction
from paddock.algorithms.kl import AdaptiveKL, KLController, kl_controller, kl_divergence
from paddock.config.roles import ActorConfig
from paddock.core.batch import PerToken
from paddock.core.masked import Denominators, aggregate, masked_mean
from verl._errors import raises_value_errors
from verl.trainer.ppo._advantages import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    compute_gae_advantage_return,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_opo_outcome_advantage,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.trainer.ppo._view import MISSING, View, read

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]

POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}


# KL.


@raises_value_errors
def kl_penalty(logprob: PerToken, ref_logprob: PerToken, kl_penalty: str) -> PerToken:
    return kl_divergence(logprob, ref_logprob, kl_penalty)


@raises_value_errors
def kl_penalty_forward(logprob: PerToken, ref_logprob: PerToken, kl_penalty: str) -> PerToken:
    return kl_divergence(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def compute_rewards(
    token_level_scores: PerToken, old_log_prob: PerToken, ref_log_prob: PerToken, kl_ratio: float
) -> PerToken:
    return token_level_scores - kl_ratio * kl_divergence(old_log_prob, ref_log_prob, "kl")


class FixedKLController(KLController):
    def __init__(self, kl_coef: float):
        super().__init__(kl_coef)

    @property
    def value(self) -> float:
        return self.coefficient

    def update(self, current_kl: float, n_steps: int) -> None:
        super().update(current_kl, n_steps)


class AdaptiveKLController(AdaptiveKL):
    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        super().__init__(init_kl_coef, target_kl, horizon)

    @property
    def value(self) -> float:
        return self.coefficient

    def update(self, current_kl: float, n_steps: int) -> None:
        super().update(current_kl, n_steps)


@raises_value_errors
def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """A bad config is refused as Paddock refuses it."""
    chosen = kl_controller(View(kl_ctrl))
    if isinstance(chosen, AdaptiveKL):
        return AdaptiveKLController(chosen.coefficient, chosen.target, chosen.horizon)
    return FixedKLController(chosen.coefficient)


# Losses.


@raises_value_errors
def agg_loss(
    loss_mat: PerToken,
    loss_mask: PerToken,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """A rank's part of the loss, times `dp_size`, since gradients are averaged over ranks."""
    counts = denominators(loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    return aggregate(loss_mat, loss_mask, loss_agg_mode, counts) * dp_size


def denominators(
    mask: PerToken, mode: str, dp_size: int, tokens: float | None, sequences: float | None, length: float | None
) -> Denominators:
    """Counts not given are taken from this batch, which only a lone rank can do; empty rows then do not count."""
    if dp_size > 1 and mode != "token-sum" and (tokens if mode == "token-mean" else sequences) is None:
        raise ValueError(f"{mode} over {dp_size} ranks needs batch_num_tokens and global_batch_size")
    here = Denominators.count(mask, length)
    return Denominators(
        here.sequences if sequences is None else float(sequences),
        here.tokens if tokens is None else float(tokens),
        here.length,
    )


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Register a policy loss of verl's signature, for callers of this module and for Paddock's trainer alike."""

    def file(fn: PolicyLossFn) -> PolicyLossFn:
        losses.POLICY_LOSS.register(name)(from_scalar(fn))
        POLICY_LOSS_REGISTRY[name] = fn
        return fn

    return file


def from_scalar(fn: PolicyLossFn) -> losses.PolicyLoss:
    """A loss that aggregates by itself, as one that returns a matrix: its number, spread evenly over the valid tokens.

    It is told the mini-batch's counts in `config.global_batch_info`; handing them to `agg_loss` keeps it independent of
    the micro-batch size. Its metrics are averaged over micro-batches by their tokens.
    """

    def matrix(x: losses.LossInputs, config: Any) -> tuple[PerToken, dict[str, PerToken]]:
        mode = config.loss_agg_mode or "token-mean"
        counts = x.denominators or Denominators.count(x.mask)
        info = {
            "dp_size": 1,
            "batch_num_tokens": counts.tokens,
            "global_batch_size": counts.sequences,
            "loss_scale_factor": counts.length,
        }
        loss, metrics = fn(
            old_log_prob=x.old_log_probs,
            log_prob=x.log_probs,
            advantages=x.advantages,
            response_mask=x.mask,
            loss_agg_mode=mode,
            config=View(config, global_batch_info=info, loss_agg_mode=mode),
            rollout_is_weights=x.weights,
        )
        each = loss / max(float((x.mask != 0).sum()), 1.0)
        constant = {name: torch.full_like(x.advantages, float(value)) for name, value in metrics.items()}
        return each.expand_as(x.log_probs), constant

    return losses.PolicyLoss(matrix, aggregate="token-sum", fixed=True, weighted=True)


@raises_value_errors
def get_policy_loss_fn(name: str) -> PolicyLossFn:
    if name not in POLICY_LOSS_REGISTRY:
        losses.POLICY_LOSS.get(name)
        POLICY_LOSS_REGISTRY[name] = from_matrix(name)
    return POLICY_LOSS_REGISTRY[name]


def from_matrix(name: str, **defaults: Any) -> PolicyLossFn:
    """One of Paddock's losses with verl's signature: `(loss, metrics)` of the batch at hand."""

    def compute(
        old_log_prob: PerToken,
        log_prob: PerToken,
        advantages: PerToken,
        response_mask: PerToken,
        loss_agg_mode: str = losses.POLICY_LOSS.get(name).aggregate,
        config: Any = None,
        rollout_is_weights: PerToken | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        inputs = losses.LossInputs(log_prob, old_log_prob, advantages, response_mask, rollout_is_weights)
        given = {key: value for key, value in defaults.items() if read(config, key, MISSING) is MISSING}
        settings = View(config, ACTOR_DEFAULTS, loss_agg_mode=loss_agg_mode, **given)
        return loss_and_metrics(name, inputs, settings, dict(read(config, "global_batch_info", {})))

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    return raises_value_errors(compute)


def loss_and_metrics(
    name: str, inputs: losses.LossInputs, settings: View, counts: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    loss = losses.POLICY_LOSS.get(name)
    matrix, kept, matrices = losses.evaluate(loss, inputs, settings)
    if name == "geo_mean" and counts.get("global_batch_size") is None:
        counts["global_batch_size"] = len(kept)  # the mean is over all rows, also empty ones
    metrics = {key: float(masked_mean(x, kept)) for key, x in matrices.items() if key.startswith("actor/")}
    return agg_loss(matrix, kept, loss.modes(settings)[0], **counts), metrics


ACTOR_DEFAULTS = ActorConfig()

compute_policy_loss_vanilla = from_matrix("vanilla")
compute_policy_loss_gspo = from_matrix("gspo")
compute_policy_loss_sapo = from_matrix("sapo")
compute_policy_loss_gpg = from_matrix("gpg")
compute_policy_loss_clip_cov = from_matrix("clip_cov")
compute_policy_loss_kl_cov = from_matrix("kl_cov")
compute_policy_loss_geo_mean = from_matrix("geo_mean")
compute_policy_loss_cispo = from_matrix("cispo")
compute_policy_loss_dppo_tv = from_matrix("dppo_tv", clip_ratio_c=20.0)
compute_policy_loss_dppo_kl = from_matrix("dppo_kl", clip_ratio_c=20.0)
compute_policy_loss_dro = from_matrix("dro")


def compute_policy_loss_reinforce(
    rollout_log_prob: PerToken,
    log_prob: PerToken,
    advantages: PerToken,
    response_mask: PerToken,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: PerToken | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    compute = from_matrix("reinforce")
    return compute(rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)


@raises_value_errors
def compute_policy_loss_bypass_mode(
    old_log_prob: PerToken,
    log_prob: PerToken,
    advantages: PerToken,
    response_mask: PerToken,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: PerToken | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """`old_log_prob` is the rollout policy's; given weights are not used, as the loss computes its own."""
    loss, metrics = from_matrix("bypass_mode")(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
    plan = losses.bypass_plan(View(config, ACTOR_DEFAULTS))
    return loss, metrics | correction(log_prob.detach(), old_log_prob, response_mask, plan).metrics


POLICY_LOSS_REGISTRY |= {
    "vanilla": compute_policy_loss_vanilla,
    "gspo": compute_policy_loss_gspo,
    "sapo": compute_policy_loss_sapo,
    "gpg": compute_policy_loss_gpg,
    "clip_cov": compute_policy_loss_clip_cov,
    "kl_cov": compute_policy_loss_kl_cov,
    "geo_mean": compute_policy_loss_geo_mean,
    "cispo": compute_policy_loss_cispo,
    "dppo_tv": compute_policy_loss_dppo_tv,
    "dppo_kl": compute_policy_loss_dppo_kl,
    "dro": compute_policy_loss_dro,
    "reinforce": compute_policy_loss_reinforce,
    "bypass_mode": compute_policy_loss_bypass_mode,
}


def compute_policy_loss(
    old_log_prob: PerToken,
    log_prob: PerToken,
    advantages: PerToken,
    response_mask: PerToken,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The old form of the vanilla loss: `(pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)`."""
    config = {
        "clip_ratio": cliprange,
        "clip_ratio_low": cliprange_low,
        "clip_ratio_high": cliprange_high,
        "clip_ratio_c": clip_ratio_c,
    }
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    clipfrac, kl, lower = (torch.tensor(metrics[name], device=loss.device) for name in names)
    return loss, clipfrac, kl, lower


@raises_value_errors
def compute_value_loss(
    vpreds: PerToken,
    returns: PerToken,
    values: PerToken,
    response_mask: PerToken,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`(vf_loss, vf_clipfrac)`, the latter of the batch at hand."""
    config = SimpleNamespace(cliprange_value=cliprange_value, loss_agg_mode=loss_agg_mode)
    counts = denominators(response_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    loss, metrics = losses.value_loss(vpreds, values, returns, response_mask, config, counts)
    share = counts.tokens / max(float((response_mask != 0).sum()), 1.0)
    return loss * dp_size, metrics["critic/vf_clipfrac"] * share


def compute_entropy_loss(logits: Tensor, response_mask: PerToken, loss_agg_mode: str = "token-mean") -> Tensor:
    return agg_loss(losses.entropy(logits), response_mask, loss_agg_mode)


__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "kl_penalty_forward",
    "register_adv_est",
    "register_policy_loss",
]
