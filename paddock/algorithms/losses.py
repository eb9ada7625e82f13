"""Policy losses, the value loss, and how they become one number.

A policy loss returns a matrix, one value per response token, and metrics of the same shape. `policy_loss_terms` weighs,
aggregates and adds them up with the denominators of the whole mini-batch, so that neither the micro-batch size nor the
number of ranks changes a gradient or a metric.

In the formulas A is the advantage, r = pi / pi_old, z = log r, sg[.] stops the gradient, and clip(x) alone is
clip(x, 1 - low, 1 + high). r is taken of z clamped to +-20, except where a loss says it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paddock.algorithms.correction import batch_norm_factor, kept_mask, truncated_weights
from paddock.algorithms.correction_metrics import BOUND
from paddock.algorithms.kl import kl_divergence
from paddock.config.roles import DECLARED_LOSSES
from paddock.config.rollout_correction import CorrectionPlan, parse
from paddock.core.batch import PerRow, PerToken
from paddock.core.masked import Denominators, aggregate, masked_mean, masked_sum
from paddock.core.registry import Registry
from paddock.core.rng import Stream, uniform
from paddock.errors import UserError

Matrices = dict[str, PerToken]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a policy loss sees of a micro-batch. Only `log_probs` carries a gradient."""

    log_probs: PerToken
    old_log_probs: PerToken
    advantages: PerToken
    mask: PerToken
    weights: PerToken | None = None
    """Importance weights, a constant factor of the loss after all clipping."""
    rollout_log_probs: PerToken | None = None
    selected: PerToken | None = None
    """What the loss's `select` found on the whole mini-batch, this micro-batch's share of it."""
    rows: PerRow | None = None
    """Row ids, so that a random choice does not depend on the order of rows; unset: 0, 1, ..."""
    denominators: Denominators | None = None
    """Counts of the whole mini-batch, for a loss that aggregates by itself."""

    @property
    def log_ratio(self) -> PerToken:
        """z = log pi - log pi_old."""
        return self.log_probs - self.old_log_probs

    def masked(self) -> LossInputs:
        """Sets columns to zero outside the mask: what stands in the padding reaches neither loss nor gradient."""
        empty = self.mask == 0
        columns = ("log_probs", "old_log_probs", "advantages", "weights", "rollout_log_probs")
        filled = {name: value for name in columns if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.masked_fill(empty, 0) for name, value in filled.items()})


@dataclass(frozen=True)
class PolicyLoss:
    """A loss and what it declares about itself."""

    matrix: Callable[[LossInputs, Any], tuple[PerToken, Matrices]]
    aggregate: str = "token-mean"
    """Aggregation where `loss_agg_mode` is unset."""
    fixed: bool = False
    """True if `aggregate` holds whatever the user asks for."""
    weighted: bool = False
    """True if the matrix already includes the importance weights."""
    prepare: Callable[[LossInputs, Any], tuple[LossInputs, Matrices]] | None = None
    """Turns the inputs into those of the matrix, e.g. takes tokens out of the mask."""
    select: Callable[[LossInputs, Any, int, int], PerToken] | None = None
    """`select(inputs, config, seed, step)`: a choice that depends on the whole mini-batch, made without gradient."""
    selects: Callable[[Any], bool] = lambda config: True
    """True if `select` has anything to choose under this config."""

    def needs_selection(self, config: Any) -> bool:
        """True if `choose` must see the whole mini-batch before its first micro-batch runs."""
        return self.select is not None and self.selects(config)

    @torch.no_grad()
    def choose(self, inputs: LossInputs, config: Any, seed: int = 0, step: int = 0) -> PerToken | None:
        """Returns the choice that becomes `LossInputs.selected`; random choices depend on (seed, step, row id,
        position) alone."""
        if self.select is None or not self.needs_selection(config):
            return None
        return self.select(inputs.masked(), config, seed, step)

    def modes(self, config: Any) -> tuple[str, str]:
        """Aggregation of the policy loss, and of entropy and KL."""
        if self.fixed:
            return self.aggregate, config.loss_agg_mode or "token-mean"
        mode = config.loss_agg_mode or self.aggregate
        return mode, mode


POLICY_LOSS: Registry[PolicyLoss] = Registry("policy loss", key="actor_rollout_ref.actor.policy_loss.loss_mode")


def policy_loss(name: str, **declared: Any) -> Callable[[Any], Any]:
    """Registers `matrix(inputs, config) -> (PerToken, metrics)` as the policy loss of this name.

    `inputs` has `log_probs`, which carry the gradient, `old_log_probs`, `advantages` and `mask`, each ``[B, R]``;
    `config` is the section `actor_rollout_ref.actor`. The matrix has the loss of each token, `metrics` further matrices
    by name. `declared` are fields of `PolicyLoss`, such as `aggregate="seq-mean-token-sum"`.

    >>> import paddock
    >>> @paddock.policy_loss("plain")
    ... def plain(inputs, config):
    ...     return -inputs.advantages * inputs.log_probs, {}
    >>> loss = {"actor_rollout_ref.actor.policy_loss.loss_mode": "plain", "data.val_files": None}
    >>> with paddock.Run(n=2, batch=4, steps=1, logger=["file"], config=loss) as run:
    ...     run.train().finished
    True
    """

    def file(matrix: Any) -> Any:
        POLICY_LOSS.register(name, by=matrix)(PolicyLoss(matrix, **declared))
        DECLARED_LOSSES.add(name)
        return matrix

    return file


def losses_of_the_program() -> dict[str, PolicyLoss]:
    """Returns the losses that no other process can import: they are sent to ranks by value."""
    losses = {name: POLICY_LOSS.get(name) for name in POLICY_LOSS.names()}
    return {name: loss for name, loss in losses.items() if loss.matrix.__module__ == "__main__"}


def evaluate(loss: PolicyLoss, inputs: LossInputs, config: Any) -> tuple[PerToken, PerToken, Matrices]:
    """The weighted loss matrix, the mask it counts on, and the metric matrices, zero where they do not count."""
    inputs = inputs.masked()
    if inputs.selected is None:
        inputs = replace(inputs, selected=loss.choose(inputs, config))
    metrics: Matrices = {}
    if loss.prepare is not None:
        inputs, metrics = loss.prepare(inputs, config)
    matrix, found = loss.matrix(inputs, config)
    if inputs.weights is not None and not loss.weighted:
        matrix = matrix * inputs.weights
    outside = inputs.mask == 0
    metrics |= {name: value.detach().masked_fill(outside, 0) for name, value in found.items()}
    return matrix, inputs.mask, metrics


def policy_loss_terms(
    inputs: LossInputs,
    config: Any,
    denominators: Denominators,
    entropy: PerToken | None = None,
    ref_log_probs: PerToken | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L = pg - entropy_coeff * agg(H) + kl_loss_coef * agg(KL(pi | pi_ref)).

    The loss and each metric are this micro-batch's share: summed over micro-batches and ranks they are those of the
    mini-batch that `denominators` counts. Metrics are means over its valid tokens.
    """
    loss = POLICY_LOSS.get(config.policy_loss.loss_mode)
    mode, other_mode = loss.modes(config)
    matrix, kept, matrices = evaluate(loss, replace(inputs, denominators=denominators), config)
    total = aggregate(matrix, kept, mode, denominators)
    metrics = {"actor/pg_loss": total.detach()}
    metrics |= {name: aggregate(x, inputs.mask, "token-mean", denominators) for name, x in matrices.items()}
    if entropy is not None:
        bonus = aggregate(entropy, inputs.mask, other_mode, denominators)
        metrics["actor/entropy"] = bonus.detach()
        if config.entropy_coeff:
            total = total - config.entropy_coeff * bonus
    if config.use_kl_loss:
        if ref_log_probs is None:
            raise ValueError("use_kl_loss needs ref_log_probs: the phase that fills them has not run")
        log_probs, reference = (x.masked_fill(inputs.mask == 0, 0) for x in (inputs.log_probs, ref_log_probs))
        kl = aggregate(kl_divergence(log_probs, reference, config.kl_loss_type), inputs.mask, other_mode, denominators)
        total = total + config.kl_loss_coef * kl
        share = (inputs.mask != 0).sum() / max(denominators.tokens, 1.0)
        metrics |= {"actor/kl_loss": kl.detach(), "actor/kl_coef": config.kl_loss_coef * share}
    return total, metrics


def wanted_columns(config: Any) -> frozenset[str]:
    """Returns what `policy_loss_terms` reads of a forward pass: entropy only for its bonus or its metric."""
    entropy = config.calculate_entropy or config.entropy_coeff != 0
    return frozenset({"log_probs", "entropy"} if entropy else {"log_probs"})


def value_loss(
    values: PerToken, old_values: PerToken, returns: PerToken, mask: PerToken, config: Any, denominators: Denominators
) -> tuple[Tensor, dict[str, Tensor]]:
    """1/2 agg(max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)), eps = cliprange_value.  arXiv:1707.06347"""
    empty = mask == 0
    values, old_values, returns = (x.masked_fill(empty, 0) for x in (values, old_values, returns))
    clipped = values.clamp(old_values - config.cliprange_value, old_values + config.cliprange_value)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    mode = config.loss_agg_mode or "token-mean"
    loss = aggregate(torch.maximum(plain_error, clipped_error), mask, mode, denominators) / 2
    means = {"critic/vf_clipfrac": (clipped_error > plain_error).to(values.dtype), "critic/vpred_mean": values.detach()}
    metrics = {name: aggregate(x, mask, "token-mean", denominators) for name, x in means.items()}
    return loss, {"critic/vf_loss": loss.detach()} | metrics


def entropy(logits: Tensor) -> Tensor:
    """H = -sum_v pi_v log pi_v over the last dimension, in float32 or better."""
    log_probs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def clip_range(config: Any) -> tuple[float, float]:
    """(low, high): each follows `clip_ratio` where it is unset."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def clip(x: Tensor, config: Any) -> Tensor:
    low, high = clip_range(config)
    return x.clamp(1 - low, 1 + high)


def bounded_log_ratio(x: LossInputs) -> PerToken:
    return x.log_ratio.clamp(-BOUND, BOUND)


def loss_metrics(log_ratio: PerToken, clipped: PerToken | None = None, lower: PerToken | None = None) -> Matrices:
    """ppo_kl = log pi_old - log pi, and the shares of tokens clipped from above and below."""
    metrics = {"actor/ppo_kl": -log_ratio}
    if clipped is not None:
        metrics["actor/pg_clipfrac"] = clipped.to(log_ratio.dtype)
    if lower is not None:
        metrics["actor/pg_clipfrac_lower"] = lower.to(log_ratio.dtype)
    return metrics


@policy_loss("vanilla")
def vanilla(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """max(-A r, -A clip(r)), and for A < 0 at most -A c, the dual clip.  arXiv:1707.06347, arXiv:1912.09729

    A high bound above the low one is DAPO's clip-higher, arXiv:2503.14476.
    """
    c = config.clip_ratio_c
    if not c > 1:
        raise UserError(
            "the dual clip bounds ratios above 1", key="actor_rollout_ref.actor.clip_ratio_c", value=c, fix="use 3.0"
        )
    z = bounded_log_ratio(x)
    plain, clipped = -x.advantages * z.exp(), -x.advantages * clip(z.exp(), config)
    upper, bound = torch.maximum(plain, clipped), -x.advantages * c
    negative = x.advantages < 0
    matrix = torch.where(negative, torch.minimum(upper, bound), upper)
    return matrix, loss_metrics(z, clipped > plain, negative & (upper > bound))


@policy_loss("gspo", aggregate="seq-mean-token-mean")
def gspo(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """max(-A s, -A clip(s)) with s_i = exp(mean_t z), its gradient spread over the row's tokens.  arXiv:2507.18071

    s_it = exp(min(sg[log s_i] + log pi_t - sg[log pi_t], 10)); z is not clamped.
    """
    z = x.log_ratio
    count = (x.mask != 0).sum(-1, keepdim=True).clamp(min=1)
    row = masked_sum(z.detach(), x.mask, -1).unsqueeze(-1) / count
    s = (row + x.log_probs - x.log_probs.detach()).clamp(max=10).exp()
    plain, clipped = -x.advantages * s, -x.advantages * clip(s, config)
    return torch.maximum(plain, clipped), loss_metrics(z, clipped > plain, torch.zeros_like(z))


@policy_loss("cispo")
def cispo(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """-sg[clip(r)] A log pi: a clipped weight, no clipped token.  arXiv:2506.13585"""
    z = bounded_log_ratio(x)
    ratio = z.detach().exp()
    weight = clip(ratio, config)
    return -weight * x.advantages * x.log_probs, loss_metrics(z, weight != ratio, torch.zeros_like(z))


@policy_loss("sapo", aggregate="seq-mean-token-mean", fixed=True)
def sapo(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos if A > 0 else tau_neg.  arXiv:2511.20347"""
    z = bounded_log_ratio(x)
    tau = torch.where(x.advantages > 0, z.new_tensor(config.tau_pos), z.new_tensor(config.tau_neg))
    gate = 4 / tau * torch.sigmoid(tau * (z.exp() - 1))
    return -x.advantages * gate, loss_metrics(z, torch.zeros_like(z), torch.zeros_like(z))


@policy_loss("gpg")
def gpg(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """-A log pi.  arXiv:2504.02546"""
    return -x.advantages * x.log_probs, {}


@policy_loss("reinforce", aggregate="seq-mean-token-sum")
def reinforce(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """-w A log pi. Summed over a row, the default, it is -w A log pi(y | x) of the whole response.  arXiv:2402.14740"""
    return -x.advantages * x.log_probs, loss_metrics(x.log_ratio)


@policy_loss("geo_mean", aggregate="seq-mean-token-mean", fixed=True, weighted=True)
def geo_mean(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """GMPO: one loss a row, -(mean_t A) exp(mean_t z~), put on each of its tokens.  arXiv:2507.20673

    z~ = sgn(A) min(sgn(A) z, sgn(A) clip(z, -low, high)); z is not clamped. A row's importance weight is the geometric
    mean of its tokens', exp(mean_t log(w + 1e-10)).
    """
    z, sign = x.log_ratio, x.advantages.sign()
    low, high = clip_range(config)
    bounded = z.clamp(-low, high)
    exponent = masked_mean(sign * torch.minimum(sign * z, sign * bounded), x.mask, -1)
    if x.weights is not None:
        exponent = exponent + masked_mean((x.weights + 1e-10).log(), x.mask, -1)
    row = -masked_mean(x.advantages, x.mask, -1) * exponent.exp()
    clipped = bounded != z
    metrics = loss_metrics(z, clipped & (x.advantages > 0), clipped & (x.advantages < 0))
    return row.unsqueeze(-1).expand_as(z), metrics


def covariance(x: LossInputs) -> PerToken:
    """(A - mean A)(log pi - mean log pi), the means over the valid tokens of the batch handed in."""
    log_probs = x.log_probs.detach()
    return (x.advantages - masked_mean(x.advantages, x.mask)) * (log_probs - masked_mean(log_probs, x.mask))


def share_of_tokens(ratio: float, mask: PerToken) -> int:
    """max(floor(ratio * N), 1) of the N valid tokens; 0.29 * 100 is 28.999... in floating point, and still gives 29."""
    return max(math.floor(ratio * int((mask != 0).sum()) + 1e-9), 1)


def highest(score: PerToken, candidates: PerToken, count: int) -> PerToken:
    """1 on the `count` candidates of highest score, or on all of them if they are fewer."""
    count = min(count, int(candidates.sum()))
    picked = torch.zeros_like(score).flatten()
    picked[score.masked_fill(~candidates, -torch.inf).flatten().topk(count).indices] = 1
    return picked.view_as(score)


def select_clip_cov(x: LossInputs, config: Any, seed: int, step: int) -> PerToken:
    """A random share of the unclipped tokens with covariance in (lb, ub).

    The draw is a function of (seed, step, row id, position): order, padding and splits do not change it.
    """
    ratio = x.log_ratio.exp()
    clipped = -x.advantages * clip(ratio, config) > -x.advantages * ratio
    cov, options = covariance(x), config.policy_loss
    candidates = (x.mask != 0) & ~clipped & (cov > options.clip_cov_lb) & (cov < options.clip_cov_ub)
    rows = torch.arange(len(cov), device=cov.device) if x.rows is None else x.rows
    position = torch.arange(cov.shape[1], device=cov.device)
    draw = uniform(seed, step, rows.unsqueeze(-1), position, stream=Stream.LOSS)
    return highest(draw, candidates, share_of_tokens(options.clip_cov_ratio, x.mask)).to(cov.dtype)


@policy_loss("clip_cov", select=select_clip_cov)
def clip_cov(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """max(-A r, -A clip(r)), and 0 on the selected tokens of high covariance; z is not clamped.  arXiv:2505.22617"""
    assert x.selected is not None
    z = x.log_ratio
    matrix = torch.maximum(-x.advantages * z.exp(), -x.advantages * clip(z.exp(), config))
    return matrix.masked_fill(x.selected != 0, 0), loss_metrics(z, x.selected)


def select_kl_cov(x: LossInputs, config: Any, seed: int, step: int) -> PerToken:
    """The share of tokens with the highest covariance."""
    return highest(covariance(x), x.mask != 0, share_of_tokens(config.policy_loss.kl_cov_ratio, x.mask))


@policy_loss("kl_cov", select=select_kl_cov)
def kl_cov(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """-A r, and on the selected tokens of highest covariance -A r + beta |z|; z is not clamped.  arXiv:2505.22617"""
    assert x.selected is not None
    z, beta = x.log_ratio, config.policy_loss.ppo_kl_coef
    penalty = (1.0 if beta is None else beta) * z.abs()
    return -x.advantages * z.exp() + x.selected * penalty, {"actor/ppo_kl": z.abs()}


def divergence_loss(x: LossInputs, config: Any, keep: PerToken) -> tuple[PerToken, Matrices]:
    """-A sg[min(r, C)] log pi on the tokens kept, C = clip_ratio_c."""
    z = bounded_log_ratio(x)
    ratio = z.detach().exp()
    matrix = -x.advantages * ratio.clamp(max=config.clip_ratio_c) * x.log_probs * keep.to(z.dtype)
    return matrix, loss_metrics(z, ~keep, keep & (ratio > config.clip_ratio_c))


@policy_loss("dppo_tv")
def dppo_tv(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """Keeps a token while pi - pi_old <= high (A > 0), or >= -low (else).  arXiv:2602.04879"""
    low, high = clip_range(config)
    change = x.log_probs.detach().exp() - x.old_log_probs.exp()
    return divergence_loss(x, config, torch.where(x.advantages > 0, change <= high, change >= -low))


@policy_loss("dppo_kl")
def dppo_kl(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """Keeps a token while k <= high or pi <= pi_old (A > 0), or k <= low or pi >= pi_old (else).  arXiv:2602.04879

    k = pi_old (log pi_old - log pi) + (1 - pi_old) log((1 - pi_old + 1e-8) / (1 - pi + 1e-8)), the binary KL.
    """
    low, high = clip_range(config)
    log_probs, old = x.log_probs.detach(), x.old_log_probs.exp()
    new = log_probs.exp()
    k = old * (x.old_log_probs - log_probs) + (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    keep = torch.where(x.advantages > 0, (k <= high) | (new <= old), (k <= low) | (new >= old))
    return divergence_loss(x, config, keep)


@policy_loss("dro")
def dro(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """-(A log pi - beta/2 z^2), beta = dro_beta; z is not clamped.  arXiv:2405.19107"""
    beta = getattr(config.policy_loss, "dro_beta", None) or getattr(config, "dro_beta", None)
    if beta is None or not beta > 0:
        raise UserError(
            "loss_mode=dro needs a positive weight for its penalty",
            key="actor_rollout_ref.actor.policy_loss.dro_beta",
            value=beta,
            fix="set it, for example to 0.1",
        )
    z = x.log_ratio
    return -(x.advantages * x.log_probs - beta / 2 * z.square()), loss_metrics(z)


def bypass_plan(config: Any) -> CorrectionPlan:
    options = getattr(config.policy_loss, "rollout_correction", None)
    if options is None:
        raise UserError(
            "loss_mode=bypass_mode reads algorithm.rollout_correction, which is missing",
            key="actor_rollout_ref.actor.policy_loss.rollout_correction",
            fix="set algorithm.rollout_correction.bypass_mode=True instead of the loss mode",
        )
    return options if isinstance(options, CorrectionPlan) else parse(options)


def bypass_log_probs(x: LossInputs) -> PerToken:
    return x.old_log_probs if x.rollout_log_probs is None else x.rollout_log_probs


def normalises(config: Any) -> bool:
    plan = bypass_plan(config)
    return plan.weights is not None and plan.batch_normalize and plan.loss == "reinforce"


def select_bypass(x: LossInputs, config: Any, seed: int, step: int) -> PerToken:
    """Returns the batch-normalised weights of the whole mini-batch."""
    plan = bypass_plan(config)
    weights = truncated_weights(x.log_probs - bypass_log_probs(x), x.mask, plan)
    return weights / batch_norm_factor(weights, x.mask, plan.weights)


@torch.no_grad()
def correct_inside(x: LossInputs, config: Any) -> tuple[LossInputs, Matrices]:
    """Correct the current policy against the one that sampled, now pi_old; rejected tokens leave the mask."""
    plan, rollout = bypass_plan(config), bypass_log_probs(x)
    log_ratio = x.log_probs - rollout
    metrics = {"rollout_corr/kl": -log_ratio, "rollout_corr/k3_kl": torch.expm1(log_ratio) - log_ratio}
    weights = None
    if plan.weights is not None:
        weights = truncated_weights(log_ratio, x.mask, plan)
        metrics["rollout_corr/rollout_is_mean"] = weights
    kept = kept_mask(log_ratio, x.mask, plan.rejections)
    if plan.rejections:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = (x.mask != kept).to(log_ratio.dtype)
    if plan.loss == "ppo_clip":
        weights = None
    elif normalises(config):
        weights = x.selected
    return replace(x, old_log_probs=rollout, mask=kept, weights=weights), metrics


@policy_loss("bypass_mode", prepare=correct_inside, select=select_bypass, selects=normalises)
def bypass_mode(x: LossInputs, config: Any) -> tuple[PerToken, Matrices]:
    """Two policies instead of three: pi_old is pi_rollout. `ppo_clip` is vanilla without weights, `reinforce` has them.

    The mini-batch is counted before rejection, as the counts are needed before the first micro-batch runs.
    """
    return (reinforce if bypass_plan(config).loss == "reinforce" else vanilla)(x, config)
