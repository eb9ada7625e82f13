"""Advantage estimators: how much better each token was than expected.

Two layers. Pure functions hold the formulas: ``*_advantage`` on outcome rewards ``R`` [B] and group ids [B], the others
on token rewards [B, R]. Registered estimators read a Batch, call them, and keep three promises:

- advantages and returns are zero outside the mask, and carry no gradient;
- no reward is lost: a reward on a masked position (a token that rejection took out, an observation) belongs to the
  valid token before it, the last one that could have caused it. ``R`` sums all columns, whatever the mask;
- a row that is masked altogether changes no loss. Its reward still counts in the baseline of its own group: the
  response was sampled, only its tokens are not learnt from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paddock.config import recipes
from paddock.core.batch import Batch, PerRow, PerToken, require_one_turn
from paddock.core.masked import EPS, group_count, group_index, group_mean, group_std, group_sum, whiten
from paddock.core.registry import Registry
from paddock.errors import UserError

Compute = Callable[[Batch, Any], tuple[PerToken, PerToken]]


@dataclass(frozen=True)
class Estimator:
    compute: Compute
    needs: frozenset[str]


ESTIMATOR: Registry[Estimator] = Registry("advantage estimator", key="algorithm.adv_estimator")


def estimator(name: str, *aliases: str, needs: Iterable[str] = ()) -> Callable[[Compute], Compute]:
    """Registers ``fn(batch, config) -> (advantages, returns)`` as an algorithm, for `Run(algorithm=name)`.

    `batch` is a scored `Batch`, `config` the section `algorithm` of the config. Both results have a number per token.

    `needs` are what a plug-in's estimator needs of a run (``config.recipes.NEEDS``), and the run honours them: a critic
    is trained, a greedy response is drawn, ... Those of our own are declared in ``config/recipes.py``.

    >>> import paddock
    >>> @paddock.estimator("centred")
    ... def centred(batch, config):
    ...     scores = batch.need("rewards").sum(-1, keepdim=True)
    ...     advantages = (scores - scores.mean()) * batch.need("mask")
    ...     return advantages, advantages
    >>> with paddock.Run(algorithm="centred", n=2, batch=4, logger=["file"]) as run:
    ...     batch = run.advantages(run.score(run.sample()))
    >>> abs(batch.need("advantages")[:, 0].mean().item()) < 1e-6
    True
    """

    known = recipes.known_needs(needs)

    def file(fn: Compute) -> Compute:
        compute = torch.no_grad()(fn)
        recipe = recipes.declare(name, (fn.__doc__ or name).splitlines()[0], known)
        ESTIMATOR.register(name, *aliases, by=fn)(Estimator(compute, recipe.needs))
        return compute

    return file


def compute_advantages(batch: Batch, config: Any) -> Batch:
    """Fills ``advantages`` and ``returns`` by the estimator that ``algorithm.adv_estimator`` names."""
    chosen = ESTIMATOR.get(config.adv_estimator)
    for need in sorted(chosen.needs):
        CHECKS[need](batch, config)
    advantages, returns = chosen.compute(batch, config)
    return batch.with_(advantages=advantages, returns=returns)


# What estimators may need, and how a batch shows it.


def check_groups(batch: Batch, config: Any) -> None:
    alone = (group_count(batch.group) == 1) & (batch.need("mask").sum(-1) > 0)
    if bool(alone.any()):
        raise UserError(
            f"{config.adv_estimator} compares the responses to a prompt, and {int(alone.sum())} prompts have only one",
            key="actor_rollout_ref.rollout.n",
            value=1,
            fix="set it to 2 or more (8 is usual), or use algorithm.adv_estimator=reinforce_plus_plus or gae",
        )


def check_components(batch: Batch, config: Any) -> None:
    missing = [key for key in config.gdpo_reward_keys or () if key not in batch.extras]
    if missing or not config.gdpo_reward_keys:
        raise UserError(
            f"the reward function gave no {missing}" if missing else "names the reward components, and none is named",
            key="algorithm.gdpo_reward_keys",
            value=config.gdpo_reward_keys,
            fix=f"return a dict of numbers from the reward function and name its keys; this batch has "
            f"{sorted(batch.extras)}",
        )
    weights = config.gdpo_reward_weights
    if weights and len(weights) != len(config.gdpo_reward_keys):
        raise UserError(
            f"there are {len(weights)} weights for {len(config.gdpo_reward_keys)} reward components",
            key="algorithm.gdpo_reward_weights",
            value=weights,
            fix="give one weight for each of algorithm.gdpo_reward_keys, or none",
        )


def check_one_turn(batch: Batch, config: Any) -> None:
    key, fix = "algorithm.adv_estimator", "algorithm.adv_estimator=tir_optimal_token_baseline, or grpo"
    require_one_turn(
        batch, "compares the tokens of a group column by column", key=key, value=config.adv_estimator, fix=fix
    )


CHECKS: dict[str, Callable[[Batch, Any], object]] = {
    "groups": check_groups,
    "critic": lambda batch, config: batch.need("values"),
    "greedy_baseline": lambda batch, config: batch.need("baseline_scores"),
    "sum_pi_squared": lambda batch, config: batch.need("sum_pi_squared"),
    "reward_components": check_components,
    "one_turn": check_one_turn,
}


# Between rows and tokens.


def outcome(batch: Batch) -> PerRow:
    """R_i: the sum of a row's rewards, over all columns."""
    return batch.need("rewards").sum(-1)


def spread(advantage: PerRow, mask: PerToken) -> PerToken:
    """Repeats each row's value on its valid tokens."""
    return advantage[:, None] * mask.to(advantage.dtype)


def on_tokens(batch: Batch, advantage: PerRow) -> tuple[PerToken, PerToken]:
    tokens = spread(advantage, batch.need("mask"))
    return tokens, tokens


def settle(rewards: PerToken, mask: PerToken) -> PerToken:
    """Moves rewards on masked positions to the valid token before; drops those before the first valid token."""
    own = (rewards * mask).contiguous()
    if torch.equal(own, rewards):
        return rewards
    width = mask.shape[1]
    stray = (own != rewards).flatten().nonzero()[:, 0]
    valid = torch.nn.functional.pad(mask.flatten().nonzero()[:, 0], (1, 0), value=-1)  # -1 precedes the first row
    receiver = valid[torch.searchsorted(valid, stray) - 1]
    same = receiver // width == stray // width
    own.view(-1).index_add_(0, receiver[same], rewards.flatten()[stray[same]])
    return own


def whitened(x: PerToken, mask: PerToken) -> PerToken:
    """``m W(x)``."""
    return whiten(x, mask).mul_(mask)


# Token-level estimators. Columns are copied to rows for the recursions over time: they then read memory in order.


def gae(rewards: PerToken, values: PerToken, mask: PerToken, gamma: float, lam: float) -> tuple[PerToken, PerToken]:
    """Generalised advantage estimation over valid tokens (arXiv:1506.02438), not whitened, and returns ``A + V``.

    ``A_t = r_t + gamma V_t' - V_t + gamma lam A_t'``; t' is the next valid token, with ``V = A = 0`` after the last.
    A masked position's reward and value are ignored; it takes ``A_t'``.
    """
    valid, value, excess = (mask != 0).T.contiguous(), values.T.contiguous(), (rewards - values).T.contiguous()
    ahead = carry = torch.zeros_like(excess[0])  # A_t' and V_t' + lam A_t'
    for t in reversed(range(len(excess))):
        own = excess[t].add_(carry, alpha=gamma)
        carry = torch.where(valid[t], torch.add(value[t], own, alpha=lam), carry)
        ahead = torch.where(valid[t], own, ahead, out=own)
    advantage = excess.T.contiguous()
    return advantage, advantage + values


def rewards_to_go(rewards: PerToken, mask: PerToken, gamma: float = 1.0) -> PerToken:
    """``G_t = r_t + gamma G_t'`` over valid tokens; a masked position takes ``G_t'``."""
    own = rewards * mask
    if gamma == 1.0:
        return own.flip(-1).cumsum_(-1).flip(-1)
    valid, returns = (mask != 0).T.contiguous(), own.T.contiguous()
    for t in reversed(range(len(returns) - 1)):
        ahead = returns[t + 1]
        torch.where(valid[t], torch.add(returns[t], ahead, alpha=gamma), ahead, out=returns[t])
    return returns.T.contiguous()


@estimator("gae")
def gae_estimator(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """PPO's: GAE, whitened over the batch. Padding is zero here, not the whitened zero that ``whiten`` leaves there."""
    mask = batch.need("mask")
    rewards = settle(batch.need("rewards"), mask)
    advantages, returns = gae(rewards, batch.need("values"), mask, config.gamma, config.lam)
    return whitened(advantages, mask), returns.mul_(mask)


@estimator("reinforce_plus_plus")
def reinforce_plus_plus(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """``A = W(G)``, G the discounted rewards to go; nothing is cut or discounted at observations. arXiv:2501.03262"""
    mask = batch.need("mask")
    returns = rewards_to_go(settle(batch.need("rewards"), mask), mask, config.gamma)
    return whitened(returns, mask), returns.mul_(mask)


@estimator("remax")
def remax(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """``A_t = G_t - R(greedy)``: rewards to go, less the score of the prompt's greedy response.  arXiv:2310.10505"""
    mask = batch.need("mask")
    returns = rewards_to_go(settle(batch.need("rewards"), mask), mask).mul_(mask)
    return returns - spread(batch.need("baseline_scores"), mask), returns


# Outcome estimators: one advantage per response.


def grpo_advantage(R: PerRow, group: PerRow, by_std: bool = True) -> PerRow:
    """``(R_i - mean) / (std + 1e-6)`` of the group; a group of one has mean 0 and std 1."""
    alone = group_count(group) == 1
    centred = R - group_mean(R, group).masked_fill(alone, 0)
    return centred / (group_std(R, group).masked_fill(alone, 1) + 1e-6) if by_std else centred


@estimator("grpo", "grpo_vectorized")
def grpo(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """``A_i = (R_i - mean) / (std + 1e-6)``, arXiv:2402.03300; without std it is Dr. GRPO's, arXiv:2503.20783."""
    return on_tokens(batch, grpo_advantage(outcome(batch), batch.group, config.norm_adv_by_std_in_grpo))


def top_two(values: PerRow, group: PerRow) -> tuple[PerRow, PerRow]:
    """Per row, the largest value of its group and the second largest: equal on a tie, 0 in a group of one."""
    index, count = group_index(group)
    order = values.argsort(descending=True, stable=True)
    ranked = values[order[index[order].argsort(stable=True)]]
    sizes = torch.bincount(index, minlength=count)
    first = sizes.cumsum(0) - sizes
    second = ranked[(first + 1).clamp(max=len(values) - 1)].masked_fill(sizes == 1, 0)
    return ranked[first][index], second[index]


def passk_advantage(R: PerRow, group: PerRow, by_std: bool = True) -> PerRow:
    """The best response gets ``R_max - R_second`` (over ``std + 1e-6``), the others nothing; a tie for best gives 0."""
    if bool((group_count(group) < 2).any()):
        raise ValueError("pass@k needs two responses to every prompt")
    best, second = top_two(R, group)
    lead = (best - second).masked_fill(best > R, 0)
    return lead / (group_std(R, group) + 1e-6) if by_std else lead


@estimator("grpo_passk")
def grpo_passk(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """Only the best of a group is reinforced, by its lead over the second: training for pass@k.  arXiv:2503.19595"""
    R, group = outcome(batch), batch.group
    paired = group_count(group) > 1  # a row alone in its group is padding, or the batch was refused
    advantage = torch.zeros_like(R)
    advantage[paired] = passk_advantage(R[paired], group[paired], config.norm_adv_by_std_in_grpo)
    return on_tokens(batch, advantage)


def rloo_advantage(R: PerRow, group: PerRow) -> PerRow:
    """``R_i - mean of the others' R_j = n / (n - 1) (R_i - mean)``; R_i itself in a group of one."""
    n = group_count(group)
    return torch.where(n > 1, (R - group_mean(R, group)) * (n / (n - 1).clamp(min=1)), R)


@estimator("rloo", "rloo_vectorized")
def rloo(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """``A_i = R_i - mean of the other responses' R_j``: REINFORCE, leave-one-out baseline.  arXiv:2402.14740"""
    return on_tokens(batch, rloo_advantage(outcome(batch), batch.group))


@estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """``A = W(R_i - mean)``: the group's mean, the batch's std.  arXiv:2501.03262"""
    mask = batch.need("mask")
    advantage = grpo_advantage(outcome(batch), batch.group, by_std=False)
    tokens = whitened(spread(advantage, mask), mask)
    return tokens, tokens


def opo_advantage(R: PerRow, lengths: PerRow, group: PerRow) -> PerRow:
    """``R_i - sum_j |y_j| R_j / sum_j |y_j|`` over the group; R_i itself in a group of one."""
    baseline = group_sum(lengths * R, group) / group_sum(lengths.to(R.dtype), group).clamp(min=1)
    return R - baseline.masked_fill(group_count(group) == 1, 0)


@estimator("opo")
def opo(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """The baseline of least variance when gradients grow with length: the length-weighted mean.  arXiv:2505.23585"""
    lengths = batch.need("mask").sum(-1)
    return on_tokens(batch, opo_advantage(outcome(batch), lengths, batch.group))


def gpg_advantage(R: PerRow, group: PerRow, counted: Tensor | None = None) -> PerRow:
    """``B / max(1, #{R != 0}) (R_i - mean)``, B and # over the ``counted`` rows (all of them if None)."""
    rows = R if counted is None else R[counted]
    return len(rows) / (rows != 0).sum().clamp(min=1) * grpo_advantage(R, group, by_std=False)


@estimator("gpg")
def gpg(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """Group policy gradient: the group's mean as baseline, scaled up where many rewards are zero.  arXiv:2504.02546"""
    return on_tokens(batch, gpg_advantage(outcome(batch), batch.group, batch.need("mask").sum(-1) > 0))


def gdpo_advantage(components: Iterable[PerRow], weights: Iterable[float], group: PerRow, by_std: bool) -> PerRow:
    """``sum_k w_k GRPO(R^(k))``, before whitening."""
    pairs = zip(components, weights, strict=True)
    return torch.stack([weight * grpo_advantage(R, group, by_std) for R, weight in pairs]).sum(0)


@estimator("gdpo")
def gdpo(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """``A = W(sum_k w_k GRPO(R^(k)))``: each reward component normalised in its group by itself.  arXiv:2601.05242

    R^(k) is ``batch.extras[key]``, a number per row (None counts as 0), for each key of ``algorithm.gdpo_reward_keys``.
    """
    mask = batch.need("mask")
    keys = config.gdpo_reward_keys
    components = [batch.numbers(key).to(mask.device) for key in keys]
    weights = config.gdpo_reward_weights or [1.0] * len(keys)
    advantage = gdpo_advantage(components, weights, batch.group, config.norm_adv_by_std_in_grpo)
    tokens = whitened(spread(advantage, mask), mask)
    return tokens, tokens


# Estimators with a baseline per token.


def optimal_token_baseline(
    rewards: PerToken,
    mask: PerToken,
    group: PerRow,
    old_log_probs: PerToken,
    sum_pi_squared: PerToken,
    weights: PerToken | None = None,
    by_rank: bool = False,
) -> tuple[PerToken, PerToken]:
    """The baseline of least gradient variance at each position, and rewards to go G.  arXiv:2602.07078

    ``w_t = 1 - 2 pi_t + sum_v pi_v^2`` (times the squared importance weight) stands for a token's squared gradient,
    ``E_t`` is its sum up to t, ``b_t = sum_i E G / (sum_i E + 1e-8)`` over the group's rows that are valid at t, and
    ``A_t = G_t - b_t``. A row that alone is longest has no baseline beyond the second longest. ``by_rank`` compares
    tokens of equal rank among a row's valid ones instead of equal column.
    """
    returns = rewards_to_go(rewards, mask)
    energy = (1 + sum_pi_squared).sub_(old_log_probs.exp(), alpha=2)
    if weights is not None:
        energy.mul_(weights).mul_(weights)
    energy = energy.mul_(mask).cumsum_(-1).mul_(mask)
    index, count = group_index(group)
    columns = mask.shape[1]
    first = index * (columns + 1)  # a group's slots: one for what precedes its first position, then its positions
    rank = mask.cumsum(-1).long() if by_rank else torch.arange(1, columns + 1, device=mask.device)
    slot = rank + first[:, None]
    empty = energy.new_zeros(count * (columns + 1))
    total = empty.scatter_add(0, slot.flatten(), energy.flatten()).add_(EPS)
    baseline = empty.scatter_add(0, slot.flatten(), energy.mul_(returns).flatten()).div_(total).take(slot)
    lengths = mask.sum(-1).long()
    longest, second = top_two(lengths, group)
    lone = ((lengths == longest) & (longest > second)).nonzero()[:, 0]
    baseline[lone] = baseline[lone].masked_fill_(slot[lone] > (first + second)[lone, None], 0)
    return torch.sub(returns, baseline, out=baseline).mul_(mask), returns


def otb_of(batch: Batch, by_rank: bool) -> tuple[PerToken, PerToken]:
    mask = batch.need("mask")
    rewards = settle(batch.need("rewards"), mask)
    log_probs, squares = batch.need("old_log_probs"), batch.need("sum_pi_squared")
    advantages, returns = optimal_token_baseline(rewards, mask, batch.group, log_probs, squares, batch.weights, by_rank)
    return advantages, returns.mul_(mask)


@estimator("optimal_token_baseline")
def otb(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """A variance-minimising baseline for every column of a group."""
    return otb_of(batch, by_rank=False)


@estimator("tir_optimal_token_baseline")
def tir_otb(batch: Batch, config: Any) -> tuple[PerToken, PerToken]:
    """Computes the same for responses interleaved with tool output: tokens are compared by rank among those the policy
    wrote."""
    return otb_of(batch, by_rank=True)
