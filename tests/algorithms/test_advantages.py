"""Estimators against values worked by hand, and against plain loops over rows and tokens in Python's own floats."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.algorithms.advantages import (
    ESTIMATOR,
    compute_advantages,
    estimator,
    gae,
    gpg_advantage,
    grpo_advantage,
    opo_advantage,
    passk_advantage,
    rewards_to_go,
    rloo_advantage,
    settle,
)
from paddock.config import recipes
from paddock.config.schema import AlgorithmConfig
from paddock.core.batch import Batch
from paddock.core.masked import whiten
from paddock.errors import UserError

KEYS = ["accuracy", "format"]
NAMES = ESTIMATOR.names()
GROUPED = [name for name in NAMES if "groups" in ESTIMATOR.get(name).needs]


def config(name: str, **keys) -> AlgorithmConfig:
    return replace(AlgorithmConfig(adv_estimator=name, gdpo_reward_keys=KEYS), **keys)


def make(rewards, mask, group, **columns) -> Batch:
    rows, width = mask.shape
    filled = {
        "values": torch.zeros(rows, width),
        "old_log_probs": torch.full((rows, width), 0.5).log(),
        "sum_pi_squared": torch.full((rows, width), 0.5),
        "baseline_scores": torch.zeros(rows),
        "extras": {key: [0.0] * rows for key in KEYS},
    } | columns
    prompts = torch.zeros(rows, 1, dtype=torch.long)
    return Batch(row=torch.arange(rows), group=group, prompts=prompts, rewards=rewards, mask=mask, **filled)


def random_batch(seed: int, groups: int = 4, width: int = 9) -> Batch:
    """Groups of 2 to 5 rows in random order, holes in the masks, a row masked altogether, rewards on any token."""
    g = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=g)

    sizes = torch.randint(2, 6, (groups,), generator=g)
    group = torch.repeat_interleave(torch.arange(groups) * 7 - 3, sizes)
    rows = len(group)
    group = group[torch.randperm(rows, generator=g)]
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    mask = ((torch.arange(width) < lengths) & (rand(rows, width) < 0.7)).float()
    mask[0] = 0
    mask[1:3, 0] = 1
    rewards = torch.randn(rows, width, generator=g) * (rand(rows, width) < 0.5)
    probability = rand(rows, width).clamp(min=0.01)
    return make(
        rewards,
        mask,
        group,
        values=torch.randn(rows, width, generator=g) * mask,
        old_log_probs=probability.log() * mask,
        sum_pi_squared=(probability**2 + (1 - probability) ** 2 * rand(rows, width)) * mask,
        baseline_scores=rand(rows),
        weights=rand(rows, width) * 2 * mask,
        extras={key: rand(rows).round(decimals=1).tolist() for key in KEYS},
    )


def assert_close(got: torch.Tensor, expected, tolerance: float = 2e-4) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert torch.allclose(got.double(), expected, atol=tolerance, rtol=tolerance), (got, expected)


# Values worked by hand.

R = torch.tensor([1.0, 0, 0, 1, 0])
ONE = torch.zeros(5, dtype=torch.long)


def pattern(good: float, bad: float) -> list[float]:
    return [good, bad, bad, good, bad]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (grpo_advantage(R, ONE), pattern(1.095443, -0.730295)),
        (grpo_advantage(R, ONE, by_std=False), pattern(0.6, -0.4)),
        (rloo_advantage(R, ONE), pattern(0.75, -0.5)),
        (opo_advantage(R, torch.tensor([10, 20, 30, 40, 50]), ONE), pattern(0.666667, -0.333333)),
        (gpg_advantage(R, ONE), pattern(1.5, -1.0)),
        (passk_advantage(torch.tensor([0.9, 0.2, 0.5, 0.1]), ONE[:4], by_std=False), [0.4, 0, 0, 0]),
        (passk_advantage(torch.tensor([0.9, 0.2, 0.5, 0.1]), ONE[:4]), [1.11297, 0, 0, 0]),
        (passk_advantage(torch.tensor([0.9, 0.2, 0.9]), ONE[:3]), [0, 0, 0]),
    ],
    ids=["grpo", "dr-grpo", "rloo", "opo", "gpg", "passk", "passk-std", "passk-tie"],
)
def test_outcome_advantages_match_values_worked_by_hand(advantage, expected):
    assert_close(advantage, expected, 2e-6)


def test_gae_matches_values_worked_by_hand():
    rewards, values, mask = torch.tensor([[0, 0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3]]), torch.ones(1, 3)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    assert_close(advantages, [[0.82675, 0.765, 0.7]], 1e-6)
    assert_close(returns, [[0.92675, 0.965, 1.0]], 1e-6)
    assert_close(whiten(advantages, mask), [[0.991343, 0.017092, -1.008435]], 1e-5)


def test_gae_passes_over_masked_positions_and_fills_them_with_the_next_advantage():
    mask = torch.tensor([[1.0, 0, 1, 0]])
    rewards, values = torch.tensor([[0.0, 50, 1, 50]]), torch.tensor([[0.1, 70, 0.3, 70]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    last = 1 - 0.3
    first = 0 + 0.9 * 0.3 - 0.1 + 0.9 * 0.5 * last
    assert_close(advantages, [[first, last, last, 0]], 1e-6)
    assert_close(returns, [[first + 0.1, last + 70, last + 0.3, 70]], 1e-6)


def test_a_group_of_one_has_the_stated_limits():
    alone = torch.tensor([0])
    two = torch.tensor([2.0])
    assert_close(grpo_advantage(two, alone), [2 / (1 + 1e-6)], 1e-7)
    for advantage in (
        grpo_advantage(two, alone, by_std=False),
        rloo_advantage(two, alone),
        opo_advantage(two, torch.tensor([4]), alone),
        gpg_advantage(two, alone),
    ):
        assert advantage.tolist() == [2.0]
    with pytest.raises(ValueError, match="two responses"):
        passk_advantage(two, alone)


# Plain loops.


def whiten_loop(rows, mask):
    valid = [x for row, m in zip(rows, mask, strict=True) for x, on in zip(row, m, strict=True) if on]
    mean, scale = statistics.fmean(valid), math.sqrt(statistics.variance(valid) + 1e-8)
    return [[(x - mean) / scale * on for x, on in zip(row, m, strict=True)] for row, m in zip(rows, mask, strict=True)]


def chains(batch: Batch):
    """For each row its valid positions, each with the rewards from there up to the next one."""
    for r, m in zip(batch.rewards.tolist(), batch.mask.tolist(), strict=True):
        places = [t for t, on in enumerate(m) if on]
        yield [(t, sum(r[t:end])) for t, end in itertools.pairwise([*places, len(m)])]


def to_go(batch: Batch, gamma: float):
    out = [[0.0] * batch.mask.shape[1] for _ in range(len(batch))]
    for i, chain in enumerate(chains(batch)):
        ahead = 0.0
        for t, reward in reversed(chain):
            ahead = out[i][t] = reward + gamma * ahead
    return out


def gae_loop(batch, keys):
    width = batch.mask.shape[1]
    advantages, returns = ([[0.0] * width for _ in range(len(batch))] for _ in range(2))
    for i, chain in enumerate(chains(batch)):
        ahead = value_ahead = 0.0
        for t, reward in reversed(chain):
            value = batch.values[i, t].item()
            ahead = reward + keys.gamma * value_ahead - value + keys.gamma * keys.lam * ahead
            value_ahead = value
            advantages[i][t], returns[i][t] = ahead, ahead + value
    return whiten_loop(advantages, batch.mask.tolist()), returns


def reinforce_plus_plus_loop(batch, keys):
    returns = to_go(batch, keys.gamma)
    return whiten_loop(returns, batch.mask.tolist()), returns


def remax_loop(batch, keys):
    returns, mask = to_go(batch, 1.0), batch.mask.tolist()
    greedy = batch.baseline_scores.tolist()
    return [[(g - greedy[i]) * m for g, m in zip(returns[i], mask[i], strict=True)] for i in range(len(batch))], returns


def outcome_loop(advantage_of_group):
    """An estimator from a function of one group's outcomes and lengths."""

    def loop(batch, keys):
        outcomes, lengths = batch.rewards.double().sum(-1).tolist(), batch.mask.sum(-1).tolist()
        tokens = []
        for i, g in enumerate(batch.group.tolist()):
            members = [j for j, h in enumerate(batch.group.tolist()) if h == g]
            values = advantage_of_group([outcomes[j] for j in members], [lengths[j] for j in members], keys)
            tokens.append([values[members.index(i)] * m for m in batch.mask[i].tolist()])
        return tokens, tokens

    return loop


def grpo_group(rewards, lengths, keys):
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    scale = std + 1e-6 if keys.norm_adv_by_std_in_grpo else 1.0
    return [(r - mean) / scale for r in rewards]


def rloo_group(rewards, lengths, keys):
    return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]


def opo_group(rewards, lengths, keys):
    total = sum(lengths)
    return [r - sum(n * s for n, s in zip(lengths, rewards, strict=True)) / max(total, 1) for r in rewards]


def passk_group(rewards, lengths, keys):
    second, best = sorted(rewards)[-2:]
    scale = statistics.stdev(rewards) + 1e-6 if keys.norm_adv_by_std_in_grpo else 1.0
    return [(best - second) / scale if r == best else 0.0 for r in rewards]


def centre_group(rewards, lengths, keys):
    return [r - statistics.fmean(rewards) for r in rewards]


def gpg_loop(batch, keys):
    counted = [r for r, n in zip(batch.rewards.sum(-1).tolist(), batch.mask.sum(-1).tolist(), strict=True) if n]
    scale = len(counted) / max(1, sum(r != 0 for r in counted))
    tokens, _ = outcome_loop(centre_group)(batch, keys)
    tokens = [[scale * x for x in row] for row in tokens]
    return tokens, tokens


def baseline_loop(batch, keys):
    tokens = whiten_loop(outcome_loop(centre_group)(batch, keys)[0], batch.mask.tolist())
    return tokens, tokens


def gdpo_loop(batch, keys):
    total = [[0.0] * batch.mask.shape[1] for _ in range(len(batch))]
    for key, weight in zip(KEYS, keys.gdpo_reward_weights or [1, 1], strict=True):
        component = torch.zeros_like(batch.rewards)
        component[:, 0] = torch.tensor(batch.extras[key])
        tokens, _ = outcome_loop(grpo_group)(batch.with_(rewards=component), keys)
        total = [[a + weight * b for a, b in zip(x, y, strict=True)] for x, y in zip(total, tokens, strict=True)]
    tokens = whiten_loop(total, batch.mask.tolist())
    return tokens, tokens


def otb_loop(by_rank):
    def loop(batch, keys):
        returns, mask, width = to_go(batch, 1.0), batch.mask.tolist(), batch.mask.shape[1]
        positions = [[int(sum(m[:t])) if by_rank else t for t in range(width)] for m in mask]
        energy = [[0.0] * width for _ in mask]
        for i, m in enumerate(mask):
            running = 0.0
            for t in range(width):
                if m[t]:
                    norm = 1 - 2 * math.exp(batch.old_log_probs[i, t].item()) + batch.sum_pi_squared[i, t].item()
                    weight = 1.0 if batch.weights is None else batch.weights[i, t].item()
                    running += norm * weight**2
                    energy[i][t] = running
        advantages = [[0.0] * width for _ in mask]
        for i, g in enumerate(batch.group.tolist()):
            members = [j for j, h in enumerate(batch.group.tolist()) if h == g]
            *_, second, longest = sorted(sum(mask[j]) for j in members)
            for t in range(width):
                if not mask[i][t]:
                    continue
                place = positions[i][t]
                peers = [(j, u) for j in members for u in range(width) if mask[j][u] and positions[j][u] == place]
                total = sum(energy[j][u] for j, u in peers) + 1e-8
                baseline = sum(energy[j][u] * returns[j][u] for j, u in peers) / total
                lone_tail = longest > second and sum(mask[i]) == longest and place >= second
                advantages[i][t] = returns[i][t] - (0.0 if lone_tail else baseline)
        return advantages, returns

    return loop


LOOPS = {
    "gae": gae_loop,
    "grpo": outcome_loop(grpo_group),
    "grpo_vectorized": outcome_loop(grpo_group),
    "grpo_passk": outcome_loop(passk_group),
    "rloo": outcome_loop(rloo_group),
    "rloo_vectorized": outcome_loop(rloo_group),
    "reinforce_plus_plus": reinforce_plus_plus_loop,
    "reinforce_plus_plus_baseline": baseline_loop,
    "remax": remax_loop,
    "opo": outcome_loop(opo_group),
    "gpg": gpg_loop,
    "optimal_token_baseline": otb_loop(by_rank=False),
    "tir_optimal_token_baseline": otb_loop(by_rank=True),
    "gdpo": gdpo_loop,
}


@pytest.mark.parametrize("keys", [{}, {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": False}], ids=["1", ".9"])
@pytest.mark.parametrize("name", NAMES)
def test_every_estimator_agrees_with_a_plain_loop(name, keys):
    for seed in range(4):
        batch, chosen = random_batch(seed), config(name, **keys)
        advantages, returns = LOOPS[name](batch, chosen)
        filled = compute_advantages(batch, chosen)
        assert_close(filled.advantages, advantages)
        assert_close(filled.returns, returns)


def test_the_optimal_baseline_works_without_importance_weights():
    batch = random_batch(1).with_(weights=None)
    for by_rank, name in enumerate(["optimal_token_baseline", "tir_optimal_token_baseline"]):
        assert_close(compute_advantages(batch, config(name)).advantages, otb_loop(bool(by_rank))(batch, None)[0])


def test_gdpo_weighs_its_components():
    batch, chosen = random_batch(2), config("gdpo", gdpo_reward_weights=[0.2, 3.0])
    assert_close(compute_advantages(batch, chosen).advantages, gdpo_loop(batch, chosen)[0])


# What holds for all of them.


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_row_order_padding_and_masked_rows_do_not_matter(name, seed):
    batch, chosen = random_batch(seed), config(name)
    expected = compute_advantages(batch, chosen)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    wide = random_batch(seed + 1, width=12)
    masked = wide.rows(slice(0, 1)).with_(row=torch.tensor([10**6]), group=torch.tensor([10**6]))
    changed = compute_advantages(Batch.concat([masked, batch.rows(order)]), chosen).rows(slice(1, None))
    changed = changed.rows(order.argsort())
    assert_close(changed.advantages[:, :9], expected.advantages, 1e-5)
    assert_close(changed.returns[:, :9], expected.returns, 1e-5)
    assert bool((changed.advantages[:, 9:] == 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_zero_outside_the_mask_and_carry_no_gradient(name):
    batch = random_batch(3)
    columns = {"rewards", "values", "old_log_probs", "sum_pi_squared"}
    batch = batch.with_(**{column: batch.need(column).clone().requires_grad_() for column in columns})
    filled = compute_advantages(batch, config(name))
    for column in (filled.advantages, filled.returns):
        assert bool((column[batch.mask == 0] == 0).all())
        assert not column.requires_grad
        assert bool((column != 0).any())


SHAPES = [(name, (2, 1)) for name in NAMES] + [(name, (1, 4)) for name in NAMES if name not in GROUPED]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_an_estimator_leaves_its_inputs_as_they_were(name, shape):
    """A transposed copy of one row or one column is no copy."""
    torch.manual_seed(0)
    columns = {key: torch.rand(shape) for key in ("values", "old_log_probs", "sum_pi_squared")}
    batch = make(torch.rand(shape), torch.ones(shape), torch.zeros(shape[0], dtype=torch.long), **columns)
    before = {key: column.clone() for key, column in batch.columns().items()}
    compute_advantages(batch, config(name, gamma=0.9))
    assert all(torch.equal(column, before[key]) for key, column in batch.columns().items())


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
@pytest.mark.parametrize("name", NAMES)
def test_a_mask_may_be_of_any_type(name, dtype):
    batch = random_batch(4)
    expected = compute_advantages(batch, config(name, gamma=0.9))
    got = compute_advantages(batch.with_(mask=batch.mask.to(dtype)), config(name, gamma=0.9))
    assert_close(got.advantages, expected.advantages, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_computes_the_same_advantages(name):
    batch, chosen = random_batch(5), config(name, gamma=0.9)
    got = compute_advantages(batch.to("cuda"), chosen).to("cpu")
    assert_close(got.advantages, compute_advantages(batch, chosen).advantages, 1e-5)


# Declared needs.


def test_names_and_needs_are_those_of_the_recipes():
    assert set(NAMES) == set(recipes.ESTIMATORS) | set(recipes.ALIASES)
    for name, recipe in recipes.ESTIMATORS.items():
        assert ESTIMATOR.get(name).needs == recipe.needs
    for alias, name in recipes.ALIASES.items():
        assert ESTIMATOR.get(alias) is ESTIMATOR.get(name)


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_is_refused_with_key_value_and_fix(name):
    batch = random_batch(0)
    with pytest.raises(UserError) as caught:
        compute_advantages(batch.with_(group=torch.arange(len(batch))), config(name))
    assert (caught.value.key, caught.value.value) == ("actor_rollout_ref.rollout.n", 1)
    assert "2 or more" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "column"), [("gae", "values"), ("remax", "baseline_scores"), ("optimal_token_baseline", "sum_pi_squared")]
)
def test_a_missing_column_is_named(name, column):
    with pytest.raises(ValueError, match=f"no '{column}'"):
        compute_advantages(random_batch(0).with_(**{column: None}), config(name))


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"gdpo_reward_keys": ["style"]}, "gdpo_reward_keys"),
        ({"gdpo_reward_keys": []}, "gdpo_reward_keys"),
        ({"gdpo_reward_weights": [1.0]}, "gdpo_reward_weights"),
    ],
)
def test_gdpo_asks_for_components_that_exist(keys, wrong):
    with pytest.raises(UserError) as caught:
        compute_advantages(random_batch(0), config("gdpo", **keys))
    assert caught.value.key == f"algorithm.{wrong}"


def test_an_unknown_estimator_is_answered_with_the_closest():
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        compute_advantages(random_batch(0), config("grppo"))


def test_an_unknown_need_is_refused_when_declared():
    with pytest.raises(ValueError, match="unknown needs"):
        estimator("mine", needs={"luck"})


# Traps that others fell into.


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_trap_grpo_vectorized_obeys_the_norm_switch(name):
    batch = make(R[:, None], torch.ones(5, 1), ONE)
    got = compute_advantages(batch, config(name, norm_adv_by_std_in_grpo=False))
    assert_close(got.advantages[:, 0], pattern(0.6, -0.4), 1e-6)


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_trap_rloo_with_one_response_is_refused_under_both_names(name):
    with pytest.raises(UserError, match="only one"):
        compute_advantages(make(torch.ones(1, 2), torch.ones(1, 2), torch.tensor([0])), config(name))


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_trap_reinforce_plus_plus_neither_cuts_nor_discounts_at_observations(gamma):
    mask = torch.tensor([[1.0, 1, 0, 0, 1]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 1]])
    got = compute_advantages(make(rewards, mask, torch.tensor([0])), config("reinforce_plus_plus", gamma=gamma))
    assert_close(got.returns, [[gamma**2, gamma, 0, 0, 1]], 1e-7)
    assert rewards_to_go(rewards, mask, gamma).tolist() == [[gamma**2, gamma, 1, 1, 1]]


def test_trap_optimal_token_baseline_runs_through_the_common_door():
    batch = random_batch(0)
    filled = compute_advantages(batch, AlgorithmConfig(adv_estimator="optimal_token_baseline"))
    assert filled.advantages.shape == batch.mask.shape


def test_a_reward_on_a_masked_position_belongs_to_the_valid_token_before():
    mask = torch.tensor([[0.0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]])
    rewards = torch.tensor([[9.0, 1, 2, 3], [4, 4, 4, 4], [5, 6, 0, 7]])
    expected = [[0, 3, 0, 3], [0, 0, 0, 0], [0, 0, 7, 0]]
    assert settle(rewards, mask).tolist() == expected
    assert settle(rewards.T.contiguous().T, mask.T.contiguous().T).tolist() == expected
    assert settle(rewards, torch.zeros(3, 4)).tolist() == [[0.0] * 4] * 3
    assert settle(rewards * mask, mask).tolist() == (rewards * mask).tolist()


def scored_at_the_end(mask: torch.Tensor) -> Batch:
    score = torch.tensor([1.0, 0.0, 2.0, 0.0])
    rewards = torch.zeros(4, 4)
    rewards[:, 3] = score
    return make(rewards, mask, torch.tensor([0, 0, 1, 1]), extras={key: score.tolist() for key in KEYS})


@pytest.mark.parametrize("name", NAMES)
def test_trap_rejecting_the_last_token_loses_no_reward(name):
    mask = torch.ones(4, 4)
    mask[:, 3] = 0
    advantages = compute_advantages(scored_at_the_end(mask), config(name)).advantages
    assert bool((advantages[[0, 2], :3] > advantages[[1, 3], :3]).all())


@pytest.mark.parametrize(
    "name", ["remax", "reinforce_plus_plus", "optimal_token_baseline", "tir_optimal_token_baseline"]
)
def test_trap_rejecting_the_last_token_leaves_the_rewards_to_go_of_the_others(name):
    mask = torch.ones(4, 4)
    whole = compute_advantages(scored_at_the_end(mask), config(name)).returns
    mask = mask.clone()
    mask[:, 3] = 0
    rejected = compute_advantages(scored_at_the_end(mask), config(name)).returns
    assert torch.equal(rejected[:, :3], whole[:, :3])
