"""Advantage estimators under verl's names; the formulas are `paddock.algorithms.advantages`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paddock.algorithms import advantages as formulas
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.masked import group_count, group_std, whiten
from paddock.errors import UserError
from verl._errors import raises_value_errors
from verl.trainer.ppo._view import View, read

Advantages = tuple[PerToken, PerToken]
AdvantageFn = Callable[..., Advantages]

ADV_ESTIMATOR_REGISTRY: dict[str, AdvantageFn] = {}


def registry() -> dict[str, AdvantageFn]:
    """Returns the registry in use: callers may have bound another one to the name in `core_algos`."""
    module = sys.modules.get("verl.trainer.ppo.core_algos")
    return getattr(module, "ADV_ESTIMATOR_REGISTRY", ADV_ESTIMATOR_REGISTRY)


class AdvantageEstimator(StrEnum):
    """Names that `algorithm.adv_estimator` takes."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


ARGUMENT_NEEDS = {"values": "critic", "reward_baselines": "greedy_baseline", "sum_pi_squared": "sum_pi_squared"}


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[AdvantageFn], AdvantageFn]:
    """Register an estimator of verl's signature, for callers of this module and for Paddock's trainer alike.

    In a Paddock run it is called with those of verl's arguments that it accepts; which of them it names says what the
    run must provide: `values` a critic, `reward_baselines` a greedy pass, `sum_pi_squared` that column.
    """
    name = plain_name(name_or_enum)

    def file(fn: AdvantageFn) -> AdvantageFn:
        if registry().get(name) is fn:
            return fn
        accepted = inspect.signature(fn).parameters
        needs = [need for argument, need in ARGUMENT_NEEDS.items() if argument in accepted]

        @functools.wraps(fn)  # its name and module tell a second definition from another function
        def compute(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
            return call_estimator(fn, batch, config)

        formulas.estimator(name, needs=needs)(compute)
        registry()[name] = fn
        return fn

    return file


def under(name: AdvantageEstimator) -> Callable[[AdvantageFn], AdvantageFn]:
    """File one of Paddock's own estimators, in verl's signature, for `get_adv_estimator_fn`."""

    def file(fn: AdvantageFn) -> AdvantageFn:
        ADV_ESTIMATOR_REGISTRY[name.value] = fn
        return fn

    return file


@raises_value_errors
def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvantageFn:
    name = plain_name(name_or_enum)
    if name not in registry():
        formulas.ESTIMATOR.get(name)
        reason = f"estimator {name!r} is Paddock's own and takes a Batch"
        raise UserError(reason, fix="call it through paddock.algorithms")
    return registry()[name]


def plain_name(name_or_enum: str | AdvantageEstimator) -> str:
    return name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum


def call_estimator(fn: AdvantageFn, batch: Batch, config: Any) -> Advantages:
    """Call an estimator of verl's signature on a Batch; its result is cut to the mask."""
    view = View(config)
    offered = {
        "token_level_rewards": batch.need("rewards"),
        "token_level_scores": batch.scores,
        "response_mask": batch.need("mask"),
        "index": np.array([str(group) for group in batch.group.tolist()], dtype=object),
        "config": view,
        "values": batch.values,
        "old_log_probs": batch.old_log_probs,
        "sum_pi_squared": batch.sum_pi_squared,
        "rollout_is_weights": batch.weights,
        "reward_baselines": batch.baseline_scores,
        "non_tensor_batch": {name: np.array(list(column), dtype=object) for name, column in batch.extras.items()},
        **{
            name: value for name in ("gamma", "lam", "norm_adv_by_std_in_grpo") if (value := view.get(name)) is not None
        },
    }
    parameters = inspect.signature(fn).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {name: value for name, value in offered.items() if value is not None and (takes_all or name in parameters)}
    advantages, returns = fn(**given)
    outside = batch.need("mask") == 0
    return advantages.masked_fill(outside, 0), returns.masked_fill(outside, 0)


def group_ids(index: Any, like: Tensor) -> PerRow:
    """Group numbers of rows whose ids are strings, numbers or a tensor."""
    keys = index.tolist() if isinstance(index, Tensor | np.ndarray) else list(index)
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], device=like.device)


def outcomes(token_level_rewards: PerToken, index: Any) -> tuple[PerRow, PerRow]:
    return token_level_rewards.sum(-1), group_ids(index, token_level_rewards)


def on_tokens(advantage: PerRow, response_mask: PerToken) -> Advantages:
    tokens = formulas.spread(advantage, response_mask)
    return tokens, tokens


def whitened(x: PerToken, response_mask: PerToken) -> Advantages:
    tokens = whiten(x, response_mask).masked_fill(response_mask == 0, 0)
    return tokens, tokens


def by_std(asked: bool | None, config: Any) -> bool:
    """The argument, else the config's key, else True."""
    return read(config, "norm_adv_by_std_in_grpo", True) if asked is None else asked


def scaled(centred: PerRow, R: PerRow, group: PerRow, epsilon: float) -> PerRow:
    """Divide by the group's std; a group of one has std 1."""
    return centred / (group_std(R, group).masked_fill(group_count(group) == 1, 1) + epsilon)


@under(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: PerToken, values: PerToken, response_mask: PerToken, gamma: float, lam: float
) -> Advantages:
    """Padding holds the whitened zero here, and returns are filled at every position."""
    advantages, returns = formulas.gae(token_level_rewards, values, response_mask, float(gamma), float(lam))
    return whiten(advantages, response_mask), returns


@under(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
) -> Advantages:
    R, group = outcomes(token_level_rewards, index)
    centred = formulas.grpo_advantage(R, group, by_std=False)
    scales = by_std(norm_adv_by_std_in_grpo, config)
    return on_tokens(scaled(centred, R, group, epsilon) if scales else centred, response_mask)


@under(AdvantageEstimator.GRPO_VECTORIZED)
def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
) -> Advantages:
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config
    )


@under(AdvantageEstimator.GRPO_PASSK)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    R, group = outcomes(token_level_rewards, index)
    lead = formulas.passk_advantage(R, group, by_std=False)
    scales = by_std(norm_adv_by_std_in_grpo, config)
    return on_tokens(scaled(lead, R, group, epsilon) if scales else lead, response_mask)


@under(AdvantageEstimator.GDPO)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Advantages:
    """The components are columns of `non_tensor_batch` named by `gdpo_reward_keys`; without them, the reward is one."""
    R, group = outcomes(token_level_rewards, index)
    components, weights = [R], None
    if non_tensor_batch is not None:
        keys = read(config, "gdpo_reward_keys", ())
        components = [torch.as_tensor(np.asarray(non_tensor_batch[key], dtype=np.float32)).to(R) for key in keys]
        weights = read(config, "gdpo_reward_weights", None)
    scales = by_std(norm_adv_by_std_in_grpo, config)
    total = formulas.gdpo_advantage(components, weights or [1.0] * len(components), group, scales)
    return whitened(formulas.spread(total, response_mask), response_mask)


@under(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """A group of one has no others to compare with: A = R."""
    R, group = outcomes(token_level_rewards, index)
    return on_tokens(formulas.rloo_advantage(R, group), response_mask)


@under(AdvantageEstimator.RLOO_VECTORIZED)
@torch.no_grad()
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """As RLOO, but a group of one gets 0."""
    R, group = outcomes(token_level_rewards, index)
    advantage = formulas.rloo_advantage(R, group).masked_fill(group_count(group) == 1, 0)
    return on_tokens(advantage, response_mask)


@under(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: PerToken, response_mask: PerToken, config: Any = None, **kwargs: Any
) -> Advantages:
    gamma = read(config, "gamma", 1.0)
    returns = formulas.rewards_to_go(token_level_rewards, response_mask, gamma).masked_fill(response_mask == 0, 0)
    return whitened(returns, response_mask)[0], returns


@under(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    R, group = outcomes(token_level_rewards, index)
    centred = formulas.spread(formulas.grpo_advantage(R, group, by_std=False), response_mask)
    return whitened(centred, response_mask)


@under(AdvantageEstimator.REMAX)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: PerToken,
    reward_baselines: PerRow,
    response_mask: PerToken,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """At an observation the advantage is the reward to go, without baseline."""
    returns = formulas.rewards_to_go(token_level_rewards, response_mask)
    return returns - formulas.spread(reward_baselines.to(returns), response_mask), returns


@under(AdvantageEstimator.OPO)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    R, group = outcomes(token_level_rewards, index)
    return on_tokens(formulas.opo_advantage(R, (response_mask != 0).sum(-1), group), response_mask)


@under(AdvantageEstimator.GPG)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    R, group = outcomes(token_level_rewards, index)
    return on_tokens(formulas.gpg_advantage(R, group) / f_norm, response_mask)


@under(AdvantageEstimator.OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    old_log_probs: PerToken,
    sum_pi_squared: PerToken,
    rollout_is_weights: PerToken | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    require_zero_tail(handle_zero_tail)
    group = group_ids(index, token_level_rewards)
    return formulas.optimal_token_baseline(
        token_level_rewards, response_mask, group, old_log_probs, sum_pi_squared, rollout_is_weights
    )


@under(AdvantageEstimator.TIR_OPTIMAL_TOKEN_BASELINE)
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: PerToken,
    response_mask: PerToken,
    index: Any,
    old_log_probs: PerToken,
    sum_pi_squared: PerToken,
    rollout_is_weights: PerToken | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    require_zero_tail(handle_zero_tail)
    group = group_ids(index, token_level_rewards)
    return formulas.optimal_token_baseline(
        token_level_rewards, response_mask, group, old_log_probs, sum_pi_squared, rollout_is_weights, by_rank=True
    )


def require_zero_tail(asked: bool) -> None:
    if not asked:
        raise UserError(
            "beyond the second longest response there is nothing to compare with, so there is no baseline",
            key="handle_zero_tail",
            value=asked,
            fix="leave it True",
        )
