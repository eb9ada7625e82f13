"""verl's names and call conventions reach Paddock's formulas, and plug-ins written for verl serve Paddock."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from paddock.algorithms.advantages import ESTIMATOR, compute_advantages
from paddock.algorithms.losses import POLICY_LOSS, LossInputs, policy_loss_terms
from paddock.core.batch import Batch
from paddock.core.masked import AGGREGATIONS, Denominators
from paddock.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
algos = import_module("verl.trainer.ppo.core_algos")

LENGTHS = [10, 20, 30, 40, 50]
SCORES = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
MASK = (torch.arange(50) < torch.tensor(LENGTHS)[:, None]).float()
REWARDS = torch.zeros(5, 50).index_put((torch.arange(5), torch.tensor(LENGTHS) - 1), SCORES)
ONE_GROUP = np.array(["0d1f-uid"] * 5, dtype=object)


def outcome(function, **arguments):
    """The advantage of each row, which must stand on all its valid tokens and nowhere else."""
    given = {"token_level_rewards": REWARDS, "response_mask": MASK, "index": ONE_GROUP} | arguments
    advantages, returns = function(**given)
    torch.testing.assert_close(advantages, advantages[:, :1] * given["response_mask"])
    torch.testing.assert_close(advantages, returns)
    return advantages[:, 0].tolist()


@pytest.mark.parametrize("form", ["uids", "ints", "int array", "tensor"])
def test_groups_may_be_uids_numbers_or_tensors(form):
    index = {
        "uids": np.array(["b", "a", "b", "a", "b"], dtype=object),
        "ints": [7, 3, 7, 3, 7],
        "int array": np.array([7, 3, 7, 3, 7]),
        "tensor": torch.tensor([7, 3, 7, 3, 7]),
    }[form]
    expected = [2 / 3, -0.5, -1 / 3, 0.5, -1 / 3]
    found = outcome(algos.compute_grpo_outcome_advantage, index=index, norm_adv_by_std_in_grpo=False)
    assert found == pytest.approx(expected)


GOLDEN = {
    "grpo": [1.095443, -0.730295, -0.730295, 1.095443, -0.730295],
    "grpo_vectorized": [1.095443, -0.730295, -0.730295, 1.095443, -0.730295],
    "rloo": [0.75, -0.5, -0.5, 0.75, -0.5],
    "rloo_vectorized": [0.75, -0.5, -0.5, 0.75, -0.5],
    "opo": [0.666667, -0.333333, -0.333333, 0.666667, -0.333333],
    "gpg": [1.5, -1.0, -1.0, 1.5, -1.0],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_advantages(name):
    assert outcome(algos.get_adv_estimator_fn(name)) == pytest.approx(GOLDEN[name], abs=2e-6)
    assert outcome(algos.get_adv_estimator_fn(algos.AdvantageEstimator(name)), config={}) == pytest.approx(
        GOLDEN[name], abs=2e-6
    )


def test_golden_pass_at_k():
    rewards = torch.tensor([[0.9], [0.2], [0.5], [0.1]])
    given = {"token_level_rewards": rewards, "response_mask": torch.ones(4, 1), "index": ["p"] * 4}
    found = outcome(algos.compute_grpo_passk_outcome_advantage, **given)
    assert found == pytest.approx([1.11297, 0, 0, 0], abs=2e-6)
    raw = outcome(algos.compute_grpo_passk_outcome_advantage, **given, norm_adv_by_std_in_grpo=False)
    assert raw == pytest.approx([0.4, 0, 0, 0])
    with pytest.raises(ValueError):
        algos.compute_grpo_passk_outcome_advantage(rewards, torch.ones(4, 1), ["p", "p", "p", "q"])


def test_golden_gae_keeps_the_whitened_zero_in_the_padding():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[0.1, 0.2, 0.3, 0.5]])
    advantages, returns = algos.compute_gae_advantage_return(rewards, values, torch.tensor([[1, 1, 1, 0]]), 1.0, 0.95)
    mean, std = torch.tensor([0.82675, 0.765, 0.7]).mean(), torch.tensor([0.82675, 0.765, 0.7]).std()
    expected = torch.tensor([[0.991343, 0.017092, -1.008435, -mean / std]])
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(returns, torch.tensor([[0.92675, 0.965, 1.0, 0.5]]))


def test_epsilon_is_honoured():
    found = outcome(algos.compute_grpo_outcome_advantage, epsilon=0.5)
    assert found[0] == pytest.approx(0.6 / (0.547723 + 0.5), abs=1e-6)


def test_reinforce_plus_plus_discounts_over_valid_tokens():
    rewards, mask = (
        torch.tensor([[0.0, 5.0, 0.0, 1.0], [0.0, 0.0, 0.5, 0.0]]),
        torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]]),
    )
    advantages, returns = algos.compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, config=OmegaConf.create({"gamma": 0.5}), index=ONE_GROUP[:2]
    )
    torch.testing.assert_close(returns, torch.tensor([[0.25, 0.0, 0.5, 1.0], [0.125, 0.25, 0.5, 0.0]]))
    valid = returns[mask != 0]
    torch.testing.assert_close(advantages[mask != 0], (valid - valid.mean()) / valid.std(), rtol=1e-5, atol=1e-5)
    assert (advantages[mask == 0] == 0).all()


def test_reinforce_plus_plus_baseline_whitens_what_the_group_leaves():
    advantages, _ = algos.compute_reinforce_plus_plus_baseline_outcome_advantage(REWARDS, MASK, ONE_GROUP)
    x = (SCORES - 0.4)[:, None].expand_as(MASK)[MASK != 0]
    torch.testing.assert_close(advantages[MASK != 0], (x - x.mean()) / x.std(), rtol=1e-4, atol=1e-5)


def test_remax_subtracts_the_greedy_score_where_the_policy_wrote():
    rewards, mask = torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    advantages, returns = algos.compute_remax_outcome_advantage(rewards, torch.tensor([0.5]), mask)
    assert advantages.tolist() == [[1.5, 2.0, 1.5]] and returns.tolist() == [[2.0, 2.0, 2.0]]


def test_gdpo_normalises_each_component():
    extras = {"accuracy": np.array([1, 0, 1, 0, 0]), "format": np.array([0.1, 0.1, 0.2, 0.3, 0.0])}
    config = SimpleNamespace(gdpo_reward_keys=["accuracy", "format"], gdpo_reward_weights=[1.0, 0.5])
    advantages, _ = algos.compute_gdpo_outcome_advantage(
        REWARDS, MASK, ONE_GROUP, config=config, non_tensor_batch=extras, batch={}
    )
    parts = [torch.tensor(column, dtype=torch.float32) for column in extras.values()]
    x = sum(w * (p - p.mean()) / (p.std() + 1e-6) for w, p in zip([1.0, 0.5], parts, strict=True))
    x = x[:, None].expand_as(MASK)[MASK != 0]
    torch.testing.assert_close(advantages[MASK != 0], (x - x.mean()) / x.std(), rtol=1e-4, atol=1e-4)


def test_trap_1_a_plus_keeps_the_value_and_takes_the_gradient_of_k2():
    new, reference = torch.tensor([[-0.7, -2.0]], requires_grad=True), torch.tensor([[-1.2, -1.0]])
    d = (new - reference).detach()
    for kind, value in {"k1+": d, "k3+": torch.exp(-d) + d - 1, "low_var_kl+": torch.exp(-d) + d - 1}.items():
        found = algos.kl_penalty(new, reference, kind)
        torch.testing.assert_close(found.detach(), value)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), new)[0], d)
    assert algos.kl_penalty(new, reference, "k1")[0, 0].item() == pytest.approx(0.5)
    assert algos.kl_penalty(new, reference, "k2")[0, 0].item() == pytest.approx(0.125)
    assert algos.kl_penalty_forward(new, reference, "k3+")[0, 0].item() == pytest.approx(0.106531, abs=1e-6)


def otb_arguments():
    random = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).float()
    return {
        "token_level_rewards": torch.rand(3, 4, generator=random) * mask,
        "response_mask": mask,
        "index": np.array(["p"] * 3, dtype=object),
        "old_log_probs": -torch.rand(3, 4, generator=random),
        "sum_pi_squared": torch.rand(3, 4, generator=random),
    }


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_trap_2_the_optimal_token_baseline_takes_a_config(name):
    given = otb_arguments()
    advantages, returns = algos.get_adv_estimator_fn(name)(**given, config=OmegaConf.create({"gamma": 1.0}))
    r, m = given["token_level_rewards"], given["response_mask"]
    go = r.flip(-1).cumsum(-1).flip(-1)
    energy = (m * (1 - 2 * given["old_log_probs"].exp() + given["sum_pi_squared"])).cumsum(-1) * m
    baseline = (energy * go).sum(0) / (energy.sum(0) + 1e-8)
    baseline = baseline.expand(3, 4).clone()
    baseline[2, 3] = 0
    torch.testing.assert_close(returns, go)
    torch.testing.assert_close(advantages, (go - baseline) * m)
    with pytest.raises(UserError, match="handle_zero_tail"):
        algos.get_adv_estimator_fn(name)(**given, handle_zero_tail=False)


def test_trap_3_the_vectorised_grpo_hears_that_std_is_off():
    vectorised = algos.get_adv_estimator_fn("grpo_vectorized")
    for off in ({"norm_adv_by_std_in_grpo": False}, {"config": OmegaConf.create({"norm_adv_by_std_in_grpo": False})}):
        assert outcome(vectorised, **off) == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])


def test_trap_4_a_group_of_one_is_left_to_rloo_and_zero_to_its_vectorised_form():
    alone = np.arange(5)
    assert outcome(algos.compute_rloo_outcome_advantage, index=alone) == pytest.approx(SCORES.tolist())
    assert outcome(algos.compute_rloo_vectorized_outcome_advantage, index=alone) == [0] * 5


def test_trap_5_seq_mean_token_sum_norm_divides_by_the_batch():
    losses, mask = torch.tensor([[1.0, 3.0, 0.0, 0.0], [4.0] * 4]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    golden = dict(zip(AGGREGATIONS, (3.333333, 10.0, 3.0, 2.5, 20.0), strict=True))
    for mode, value in golden.items():
        assert algos.agg_loss(losses, mask, mode).item() == pytest.approx(value, abs=1e-6)
    assert algos.agg_loss(losses, mask, "seq-mean-token-sum-norm", loss_scale_factor=10).item() == pytest.approx(1.0)


def test_ranks_and_micro_batches_average_to_the_whole_loss():
    losses, mask = torch.rand(4, 3), torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    counts = {"batch_num_tokens": 6, "global_batch_size": 4}
    for mode in AGGREGATIONS:
        whole = algos.agg_loss(losses, mask, mode, **counts)
        ranks = [algos.agg_loss(losses[i : i + 2], mask[i : i + 2], mode, dp_size=2, **counts) for i in (0, 2)]
        torch.testing.assert_close(sum(ranks) / 2, whole)
        if mode != "token-sum":
            with pytest.raises(ValueError, match="2 ranks"):
                algos.agg_loss(losses, mask, mode, dp_size=2)
    assert algos.agg_loss(losses, mask, "seq-mean-token-sum").item() == pytest.approx(
        (losses * mask).sum().item() / 3
    ), "without a given count an empty row does not count"


# Policy losses.


@dataclass
class PolicyLossNode:
    loss_mode: str = "vanilla"
    clip_cov_ratio: float = 0.1
    clip_cov_lb: float = 0.01
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.1
    ppo_kl_coef: float | None = 0.3
    dro_beta: float | None = 0.4
    rollout_correction: dict | None = None


@dataclass
class ActorNode:
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = 0.2
    clip_ratio_high: float | None = 0.28
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    policy_loss: PolicyLossNode = field(default_factory=PolicyLossNode)
    global_batch_info: dict = field(default_factory=dict)

    def get(self, name, default=None):
        return getattr(self, name, default)


CORRECTION = {"loss_type": "reinforce", "rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.1}
LOSSES = [
    "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro",
    "reinforce", "bypass_mode",
]  # fmt: skip


def actor(name="vanilla", **keys):
    return ActorNode(policy_loss=PolicyLossNode(loss_mode=name, rollout_correction=CORRECTION), **keys)


def sample(seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return torch.rand(6, 7, generator=random) * (high - low) + low

    old = draw(-2.0, -0.1)
    mask = (draw(0, 1) < 0.8).float()
    mask[5] = 0
    new = (old + draw(-0.5, 0.5)).requires_grad_()
    return {"old_log_prob": old, "log_prob": new, "advantages": draw(-1.5, 1.5), "response_mask": mask}


def paddock_inputs(given, weights=None):
    return LossInputs(given["log_prob"], given["old_log_prob"], given["advantages"], given["response_mask"], weights)


def in_paddock(name, given, mode, weights=None):
    config = actor(name)
    config.loss_agg_mode, config.entropy_coeff, config.use_kl_loss = mode, 0.0, False
    config.policy_loss.rollout_correction = SimpleNamespace(**CORRECTION)
    counts = Denominators.count(given["response_mask"])
    if name == "geo_mean":
        counts = replace(counts, sequences=len(given["response_mask"]))
    return policy_loss_terms(paddock_inputs(given, weights), config, counts)


@pytest.mark.parametrize("kind", ["dataclass", "omegaconf", "dict"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_loss_is_paddocks_whatever_kind_of_config_it_gets(name, kind):
    given, weights, config = sample(), torch.rand(6, 7) + 0.5, actor(name)
    if name == "bypass_mode":
        config.policy_loss.rollout_correction = CORRECTION | {"rollout_rs": None}
    if kind == "omegaconf":
        config = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(config)))
    elif kind == "dict":
        config = OmegaConf.to_container(OmegaConf.structured(config))
    function, mode = algos.get_policy_loss_fn(name), "seq-mean-token-sum"
    if name == "reinforce":
        given["rollout_log_prob"] = given.pop("old_log_prob")
    loss, metrics = function(**given, loss_agg_mode=mode, config=config, rollout_is_weights=weights)
    if name == "reinforce":
        given["old_log_prob"] = given.pop("rollout_log_prob")
    expected, partial = in_paddock(name, given, mode, weights)
    if name == "bypass_mode":
        return assert_bypass(given, loss, metrics)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, given["log_prob"])[0] for x in (loss, expected)))
    found = {name: value.item() for name, value in partial.items() if name != "actor/pg_loss"}
    assert metrics == pytest.approx(found)
    assert all(isinstance(value, float) for value in metrics.values())


def assert_bypass(given, loss, metrics):
    log_ratio = (given["log_prob"] - given["old_log_prob"]).detach()
    weights = log_ratio.exp().clamp(max=2.0)
    rows = (-given["advantages"] * weights * given["log_prob"] * given["response_mask"]).sum(-1)
    assert loss.item() == pytest.approx((rows.sum() / 5).item(), rel=1e-5)
    assert {"actor/ppo_kl", "rollout_corr/rollout_is_mean", "rollout_corr/training_ppl"} <= metrics.keys()


def test_bypass_counts_the_tokens_that_rejection_leaves():
    given = sample()
    loss, metrics = algos.compute_policy_loss_bypass_mode(**given, config=actor())
    z = (given["log_prob"] - given["old_log_prob"]).detach()
    kept = given["response_mask"] * (z.square() / 2 <= 0.1)
    tokens = -given["advantages"] * z.exp().clamp(max=2.0) * given["log_prob"]
    assert loss.item() == pytest.approx(((tokens * kept).sum() / kept.sum()).item(), rel=1e-5)
    assert metrics["actor/ppo_kl"] == pytest.approx(((-z * kept).sum() / kept.sum()).item(), rel=1e-5)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        1 - (kept.sum() / given["response_mask"].sum()).item(), abs=1e-6
    )


def test_a_loss_without_a_config_uses_paddocks_defaults():
    given = sample()
    loss, _ = algos.compute_policy_loss_vanilla(**given)
    old_form, clipfrac, kl, lower = algos.compute_policy_loss(**given, cliprange=0.2, clip_ratio_c=3.0)
    torch.testing.assert_close(loss, old_form)
    assert 0 < clipfrac < 1 and kl != 0 and lower >= 0


def test_divergence_losses_truncate_at_20_when_the_config_names_no_bound():
    old = torch.full((1, 1), -6.0)
    given = {"old_log_prob": old, "log_prob": old + math.log(15.0), "advantages": torch.ones(1, 1)}
    for compute in (algos.compute_policy_loss_dppo_tv, algos.compute_policy_loss_dppo_kl):
        loss, metrics = compute(**given, response_mask=torch.ones(1, 1), config={"clip_ratio": 0.2})
        assert loss.item() == pytest.approx(-15 * (-6 + math.log(15.0)), rel=1e-4)
        assert metrics["actor/pg_clipfrac_lower"] == 0
        _, metrics = compute(**given, response_mask=torch.ones(1, 1), config={"clip_ratio": 0.2, "clip_ratio_c": 3.0})
        assert metrics["actor/pg_clipfrac_lower"] == 1


def test_dro_beta_is_found_on_the_actor_too():
    given, config = sample(), {"dro_beta": 0.4}
    torch.testing.assert_close(
        algos.compute_policy_loss_dro(**given, config=config)[0],
        algos.compute_policy_loss_dro(**given, config={"policy_loss": {"dro_beta": 0.4}})[0],
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("clip_cov", "kl_cov")])
def test_trap_11_global_counts_make_micro_batches_add_up(name):
    given = sample()
    config = actor(
        name, global_batch_info={"batch_num_tokens": int(given["response_mask"].sum()), "global_batch_size": 6}
    )
    compute = algos.get_policy_loss_fn(name)
    arguments = (given["old_log_prob"], given["log_prob"], given["advantages"], given["response_mask"])
    whole, _ = compute(*arguments, config=config)
    parts = [compute(*(column[rows] for column in arguments), config=config)[0] for rows in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(sum(parts), whole)


def test_geo_mean_is_the_mean_over_all_rows_also_empty_ones():
    given = sample()
    loss, _ = algos.compute_policy_loss_geo_mean(**given, loss_agg_mode="token-mean", config=actor())
    full = {name: column[:5] for name, column in given.items()}
    assert loss.item() * 6 == pytest.approx(algos.compute_policy_loss_geo_mean(**full, config=actor())[0].item() * 5)


def test_value_loss_and_entropy():
    one = torch.ones(1, 1)
    loss, clipfrac = algos.compute_value_loss(0.6 * one, 0.7 * one, 0 * one, one, 0.5)
    assert loss.item() == pytest.approx(0.02) and clipfrac.item() == 1
    shard, clipfrac = algos.compute_value_loss(
        0.6 * one, 0.7 * one, 0 * one, one, 0.5, dp_size=2, batch_num_tokens=4, global_batch_size=2
    )
    assert shard.item() == pytest.approx(0.01) and clipfrac.item() == 1
    logits = torch.zeros(2, 3, 8)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert algos.compute_entropy_loss(logits, mask).item() == pytest.approx(math.log(8))
    assert algos.compute_entropy_loss(logits, mask, "token-sum").item() == pytest.approx(3 * math.log(8))


def test_kl_controllers():
    fixed = algos.get_kl_controller(OmegaConf.create({"type": "fixed", "kl_coef": 0.001}))
    fixed.update(current_kl=9.0, n_steps=100)
    assert fixed.value == 0.001 and isinstance(fixed, algos.FixedKLController)
    options = {"type": "adaptive", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1}
    adaptive = algos.get_kl_controller(SimpleNamespace(**options))
    adaptive.update(current_kl=0.3, n_steps=5120)
    assert adaptive.value == pytest.approx(0.001102, abs=1e-6) and isinstance(adaptive, algos.AdaptiveKLController)
    direct = algos.AdaptiveKLController(init_kl_coef=0.001, target_kl=0.1, horizon=10000)
    direct.update(0.3, 5120)
    assert direct.value == adaptive.value
    scores = torch.tensor([[0.0, 1.0]])
    found = algos.compute_rewards(scores, torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), 0.1)
    torch.testing.assert_close(found, torch.tensor([[-0.05, 1.1]]))


# Plug-ins.


@pytest.fixture
def forget():
    """Registries as they were."""
    books = (algos.ADV_ESTIMATOR_REGISTRY, algos.POLICY_LOSS_REGISTRY, ESTIMATOR._entries, POLICY_LOSS._entries)
    before = [dict(book) for book in books]
    yield
    for book, entries in zip(books, before, strict=True):
        book.clear()
        book.update(entries)


def test_an_estimator_written_for_verl_serves_paddock(forget):
    seen = {}

    @algos.register_adv_est("best_of_group")
    def best_of_group(token_level_rewards, response_mask, index, config=None, **kwargs):
        seen.update(kwargs, index=index)
        scores = token_level_rewards.sum(-1)
        best = {uid: max(scores[i].item() for i in range(len(index)) if index[i] == uid) for uid in index}
        advantage = torch.tensor(
            [scores[i].item() - config.get("scale", 1.0) * best[index[i]] for i in range(len(index))]
        )
        return advantage[:, None] + 0 * response_mask, advantage[:, None] * response_mask

    assert algos.get_adv_estimator_fn("best_of_group") is best_of_group
    batch = Batch(
        row=torch.arange(5), group=torch.tensor([4, 4, 9, 9, 9]), prompts=torch.zeros(5, 1), mask=MASK, rewards=REWARDS,
        scores=REWARDS, old_log_probs=-MASK, extras={"acc": [1, 0, 0, 1, 0]},
    )  # fmt: skip
    found = compute_advantages(batch, SimpleNamespace(adv_estimator="best_of_group", scale=0.5, gamma=1.0))
    torch.testing.assert_close(found.advantages, torch.tensor([0.5, -0.5, -0.5, 0.5, -0.5])[:, None] * MASK)
    assert seen["index"].tolist() == ["4", "4", "9", "9", "9"]
    assert {"old_log_probs", "gamma", "non_tensor_batch"} <= seen.keys() and "values" not in seen


def test_an_estimators_arguments_say_what_it_needs(forget):
    @algos.register_adv_est("mine")
    def mine(token_level_rewards, response_mask, values, sum_pi_squared, gamma=1.0):
        return values, values

    assert ESTIMATOR.get("mine").needs == {"critic", "sum_pi_squared"}
    with pytest.raises(ValueError, match="registered already"):
        algos.register_adv_est("mine")(lambda token_level_rewards, response_mask: None)
    with pytest.raises(UserError, match="no advantage estimator named 'nine'"):
        algos.get_adv_estimator_fn("nine")


def test_a_policy_loss_written_for_verl_serves_paddock_and_does_not_depend_on_the_split(forget):
    @algos.register_policy_loss("mine")
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        ratio = torch.exp(log_prob - old_log_prob).clamp(max=1 + config.clip_ratio)
        matrix = -advantages * ratio * (1.0 if rollout_is_weights is None else rollout_is_weights)
        loss = algos.agg_loss(matrix, response_mask, loss_agg_mode, **config.global_batch_info)
        share = ((ratio > 1) * response_mask).sum() / response_mask.sum().clamp(min=1)
        return loss, {"actor/rising": share.item()}

    given, weights = sample(), torch.rand(6, 7)
    assert algos.get_policy_loss_fn("mine") is mine
    mask, counts = given["response_mask"], Denominators.count(given["response_mask"])
    for mode in AGGREGATIONS:
        config = actor("mine")
        config.loss_agg_mode, config.entropy_coeff, config.use_kl_loss = mode, 0.0, False
        x = paddock_inputs(given, weights)
        whole, metrics = policy_loss_terms(x, config, counts)
        matrix = -given["advantages"] * torch.exp(given["log_prob"] - given["old_log_prob"]).clamp(max=1.2) * weights
        torch.testing.assert_close(whole, algos.agg_loss(matrix, mask, mode))
        parts = []
        for rows in ([0, 1, 2], [3], [4, 5]):
            shard = LossInputs(**{n: c[rows] for n, c in vars(x).items() if isinstance(c, torch.Tensor)})
            parts.append(policy_loss_terms(shard, config, counts))
        torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
        torch.testing.assert_close(sum(found["actor/rising"] for _, found in parts), metrics["actor/rising"])


def test_one_of_paddocks_losses_is_not_replaced_by_a_plug_in(forget):
    with pytest.raises(ValueError, match="registered already"):
        algos.register_policy_loss("vanilla")(lambda **kwargs: None)


def test_the_enum_names_every_estimator_paddock_has():
    assert {estimator.value for estimator in algos.AdvantageEstimator} <= set(ESTIMATOR.names())
    assert str(algos.AdvantageEstimator.GAE) == "gae" == algos.AdvantageEstimator.GAE
    assert set(LOSSES) == set(algos.POLICY_LOSS_REGISTRY)
