"""How far the policy is from the reference: per-token estimates of KL, and the penalty they put on rewards.

The estimators read ``d = log pi - log pi_ref`` of the sampled token; http://joschu.net/blog/kl-approx.html names them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paddock.core.batch import Batch, PerToken
from paddock.core.masked import masked_mean
from paddock.core.registry import suggest
from paddock.errors import UserError

KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k1": "k1", "abs": "abs", "k2": "k2", "k3": "k3"}


def kl_divergence(log_probs: PerToken, ref_log_probs: PerToken, kind: str) -> PerToken:
    """Per-token KL estimate. A trailing "+" keeps the value and takes the gradient of k2, the right one for KL.

    ``k1 = d``, ``abs = |d|``, ``k2 = d^2 / 2``, ``k3 = exp(-d) + d - 1``; ``x+ = k2 - sg[k2] + sg[x]``.
    """
    name = check_kind(kind)
    d = log_probs - ref_log_probs
    if not kind.endswith("+"):
        return estimate(d, name)
    k2 = d.square() / 2
    return k2 - k2.detach() + estimate(d, name).detach()


def estimate(d: Tensor, name: str) -> Tensor:
    if name == "k1":
        return d
    if name == "abs":
        return d.abs()
    if name == "k2":
        return d.square() / 2
    d = d.clamp(-20, 20)  # exp must not overflow on a token the reference all but forbids
    return (torch.exp(-d) + d - 1).clamp(-10, 10)


def check_kind(kind: str) -> str:
    """Returns the estimator's own name, without alias or "+"; a UserError where there is none."""
    base = kind.removesuffix("+")
    if base == "full":
        reason = "the full KL needs the probabilities of the whole vocabulary, which a batch does not carry"
        raise UserError(
            f"KL estimator 'full': {reason}", fix="use low_var_kl (k3), which estimates it from the samples"
        )
    if base not in KINDS:
        raise UserError(
            f"there is no KL estimator named {kind!r}", fix=f'{suggest(base, list(KINDS))}; each also with "+"'
        )
    return KINDS[base]


class KLController:
    """Keeps the coefficient of the KL penalty where the config sets it, also in a run that resumes with another."""

    def __init__(self, coefficient: float):
        self.coefficient = coefficient

    def update(self, current_kl: float, rows: int) -> None:
        """Called once a step, after the coefficient was used."""

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignores the coefficient of a checkpoint: the config's counts."""


class AdaptiveKL(KLController):
    """``beta <- beta (1 + clip(kl / target - 1, +-0.2) rows / horizon)``.  arXiv:1909.08593"""

    def __init__(self, coefficient: float, target: float, horizon: float):
        super().__init__(coefficient)
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, rows: int) -> None:
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * rows / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


def kl_controller(config: Any) -> KLController:
    """The controller that ``algorithm.kl_ctrl`` asks for."""
    if config.type == "fixed":
        return KLController(config.kl_coef)
    if config.type == "adaptive":
        return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
    known = suggest(config.type, ["adaptive", "fixed"])
    raise UserError("there is no such KL controller", key="algorithm.kl_ctrl.type", value=config.type, fix=known)


@torch.no_grad()
def penalise(batch: Batch, kind: str, controller: KLController) -> tuple[Batch, dict[str, float]]:
    """``rewards = scores - beta m kl(old policy | reference)``; then the controller sees the KL, mean of row means."""
    mask = batch.need("mask")
    kl = kl_divergence(batch.need("old_log_probs"), batch.need("ref_log_probs"), kind).masked_fill(mask == 0, 0)
    beta = controller.coefficient
    current_kl = float(masked_mean(kl, mask, -1).mean())
    controller.update(current_kl, len(batch))
    metrics = {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
    return batch.with_(rewards=batch.need("scores") - beta * kl), metrics
