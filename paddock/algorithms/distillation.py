"""On-policy distillation: the student learns from a teacher on sequences that the student drew.

In the formulas pi is the student, nu the teacher, both at the sampling temperature, and y the token that was drawn. A
divergence is a matrix, one value per response token; `distillation_terms` makes one number of it with the denominators
of the whole mini-batch, so that a split of the batch changes no gradient.  arXiv:2306.13649
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paddock.algorithms.kl import kl_divergence
from paddock.algorithms.losses import POLICY_LOSS, LossInputs, Matrices, evaluate
from paddock.config.distillation import LOSSES, TOPK, DistillationLossConfig
from paddock.core.batch import PerToken
from paddock.core.masked import Denominators, aggregate


@dataclass(frozen=True, eq=False)
class Taught:
    """What teacher and student say of a micro-batch. Only `choice_log_probs` carries a gradient."""

    log_probs: PerToken | None = None
    """log nu(y)."""
    topk_log_probs: Tensor | None = None
    """``[B, R, k]``: log nu of the teacher's k likeliest tokens."""
    choice_log_probs: Tensor | None = None
    """``[B, R, k]``: log pi of the same tokens."""
    kth_log_probs: PerToken | None = None
    """log pi of the student's own k-th likeliest token."""


def forward_kl(choice_log_probs: Tensor, topk_log_probs: Tensor, floor: float | None = None) -> Tensor:
    """``sum_j nu(t_j) (log nu(t_j) - log pi(t_j))`` over the teacher's k likeliest tokens t_j: ``[..., k] -> [...]``.

    `floor` is the lowest log-prob of either. The rest of the vocabulary is left out, so the sum may fall below 0.
    """
    if floor is not None:
        choice_log_probs, topk_log_probs = choice_log_probs.clamp(min=floor), topk_log_probs.clamp(min=floor)
    return (topk_log_probs.exp() * (topk_log_probs - choice_log_probs)).sum(-1)


def divergence(log_probs: PerToken, taught: Taught, mask: PerToken, config: Any) -> tuple[PerToken, Matrices]:
    """Returns the divergence of each token before `loss_max_clamp`, 0 outside the mask, and matrices for metrics.

    k1, k2, k3, abs: the estimate at y (see kl.py). forward_kl_topk: max(0, forward_kl), whose gradient is
    ``-sum_j nu(t_j) grad log pi(t_j)`` where it is above 0.
    """
    empty = mask == 0
    if config.loss_mode != TOPK:
        assert taught.log_probs is not None
        student, teacher = (x.masked_fill(empty, 0) for x in (log_probs, taught.log_probs))
        found = kl_divergence(student, teacher, config.loss_mode)
        return found, {"distillation/abs_loss": found.detach().abs()}
    assert taught.choice_log_probs is not None and taught.topk_log_probs is not None
    student, teacher = (x.masked_fill(empty.unsqueeze(-1), 0) for x in (taught.choice_log_probs, taught.topk_log_probs))
    found = forward_kl(student, teacher, config.log_prob_min_clamp).clamp(min=0)
    return found, overlap(student.detach(), teacher, taught.kth_log_probs, config.log_prob_min_clamp)


def overlap(student: Tensor, teacher: Tensor, kth: PerToken | None, floor: float | None) -> Matrices:
    """Returns the mass that each gives to the teacher's k tokens, the share of them that is among the student's own k
    likeliest, and the mean of -nu (log nu - log pi) over that share.  arXiv:2604.13016"""
    assert kth is not None
    shared = student >= kth.unsqueeze(-1)
    count = shared.sum(-1)
    lowest = torch.finfo(student.dtype).min if floor is None else floor
    gain = teacher.clamp(min=lowest).exp() * (student.clamp(min=lowest) - teacher.clamp(min=lowest))
    return {
        "distillation/student_mass": student.exp().sum(-1),
        "distillation/teacher_mass": teacher.exp().sum(-1),
        "distillation/overlap_ratio": count / student.shape[-1],
        "distillation/overlap_token_advantage": (gain * shared).sum(-1) / count.clamp(min=1),
    }


def distillation_terms(
    inputs: LossInputs, taught: Taught, config: DistillationLossConfig, actor: Any, denominators: Denominators
) -> tuple[Tensor, dict[str, Tensor]]:
    """``agg(clamp(D))``; with `use_policy_gradient` the policy loss whose advantage is ``-sg[clamp(D)]``.

    Both are this micro-batch's share of the mini-batch that `denominators` counts. `actor` has the aggregation, and
    the keys of the policy loss that `config` has not.
    """
    found, matrices = divergence(inputs.log_probs, taught, inputs.mask, config)
    matrices = {name: x.masked_fill(inputs.mask == 0, 0) for name, x in matrices.items()}
    metrics = {name: aggregate(x, inputs.mask, "token-mean", denominators) for name, x in matrices.items()}
    metrics |= extremes("distillation/loss", found.detach(), inputs.mask)
    for name in ("student_mass", "teacher_mass"):
        if (mass := matrices.get(f"distillation/{name}")) is not None:
            metrics |= extremes(f"distillation/{name}", mass, inputs.mask)
    if config.loss_max_clamp is not None:
        found = found.clamp(-config.loss_max_clamp, config.loss_max_clamp)
    mode, mask = actor.loss_agg_mode or "token-mean", inputs.mask
    if config.use_policy_gradient:
        loss = POLICY_LOSS.get(config.policy_loss_mode)
        rewarded = replace(inputs, advantages=-found.detach(), denominators=denominators)
        found, mask, more = evaluate(loss, rewarded, clipping(actor, config))
        named = {f"distillation/{name.removeprefix('actor/')}": x for name, x in more.items()}
        metrics |= {name: aggregate(x, inputs.mask, "token-mean", denominators) for name, x in named.items()}
    total = aggregate(found, mask, mode, denominators)
    return total, metrics | {"distillation/loss": total.detach()}


def clipping(actor: Any, config: DistillationLossConfig) -> Any:
    """Returns the actor's keys with the clip range of the distillation loss."""
    keys = copy.copy(actor)
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        setattr(keys, name, getattr(config, name))
    return keys


def extremes(name: str, x: PerToken, mask: PerToken) -> dict[str, Tensor]:
    """Returns the smallest and the largest value of tokens that count, 0 if none does; `join_shares` joins shares."""
    empty = mask == 0
    nothing = empty.all()
    return {
        f"{name}_min": x.masked_fill(empty, torch.inf).min().masked_fill(nothing, 0),
        f"{name}_max": x.masked_fill(empty, -torch.inf).max().masked_fill(nothing, 0),
    }


def wanted_of_student(config: DistillationLossConfig) -> frozenset[str]:
    """Returns what the loss reads of the student's forward pass beside log-probs."""
    return frozenset({"choice_log_probs", "kth_log_probs"} if config.loss_mode == TOPK else ())


def wanted_of_teacher(config: DistillationLossConfig) -> frozenset[str]:
    """Returns what the loss reads of the teacher's forward pass."""
    return LOSSES[config.loss_mode]
