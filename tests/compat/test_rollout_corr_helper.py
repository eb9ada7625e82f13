"""verl's names for rollout correction, roles and what a config needs."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from paddock.algorithms.correction import correction
from paddock.config.rollout_correction import REJECTION_OPTIONS, parse
from paddock.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
corr, roles = (import_module(f"verl.trainer.ppo.{name}") for name in ("rollout_corr_helper", "utils"))
Role = roles.Role

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOG_RATIO = torch.tensor([[0.1, -0.2, 0.3], [0.9, 0.0, 5.0]])
ROLLOUT = torch.full((2, 3), -1.0)
KEYS = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.2,
    "rollout_is_batch_normalize": True,
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.7_2.0",
}


def test_the_combined_call_gives_weights_mask_and_prefixed_metrics():
    proto, mask, metrics = corr.compute_rollout_correction_and_rejection_mask(
        old_log_prob=ROLLOUT + LOG_RATIO, rollout_log_prob=ROLLOUT, response_mask=MASK, **KEYS
    )
    expected = correction(ROLLOUT + LOG_RATIO, ROLLOUT, MASK, parse(SimpleNamespace(**KEYS)))
    torch.testing.assert_close(proto.batch["rollout_is_weights"], expected.weights)
    assert mask.tolist() == [[1, 1, 1], [0, 0, 0]] and metrics == expected.metrics


def test_without_options_there_are_metrics_only():
    proto, mask, metrics = corr.compute_rollout_correction_and_rejection_mask(ROLLOUT + LOG_RATIO, ROLLOUT, MASK)
    assert proto is None and torch.equal(mask, MASK) and len(metrics) == 13
    plain = corr.compute_offpolicy_metrics(ROLLOUT + LOG_RATIO, ROLLOUT, MASK)
    assert {f"rollout_corr/{name}": value for name, value in plain.items()} == metrics
    assert corr.compute_rollout_corr_metrics_from_logprobs(ROLLOUT + LOG_RATIO, ROLLOUT, MASK) == metrics


def test_the_single_calls_name_their_metrics_without_the_section():
    weights, metrics = corr.compute_rollout_correction_weights(LOG_RATIO, MASK, "token", 2.0)
    expected = torch.tensor([[1.105171, 0.818731, 1.349859], [2.0, 1.0, 0.0]])
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(0.903392, abs=2e-6)
    mask, metrics = corr.compute_rollout_rejection_mask(LOG_RATIO, MASK, "token_k1", "0.5_1.1")
    assert mask.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert metrics["rollout_rs_token_k1_masked_fraction"] == pytest.approx(0.4)
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(0.4)
    with pytest.raises(UserError, match="rollout_rs_threshold"):
        corr.compute_rollout_rejection_mask(LOG_RATIO, MASK)
    assert set(REJECTION_OPTIONS) == corr.SUPPORTED_ROLLOUT_RS_OPTIONS
    assert {"token_k1", "token_k2", "token_k3"} == corr.TOKEN_LEVEL_ROLLOUT_RS_OPTIONS


@pytest.mark.parametrize("form", [dict, OmegaConf.create, lambda keys: SimpleNamespace(**keys)])
def test_a_batch_gets_its_weights_and_its_mask(form):
    batch = SimpleNamespace(
        batch={"old_log_probs": ROLLOUT + LOG_RATIO, "rollout_log_probs": ROLLOUT, "response_mask": MASK}
    )
    same, metrics = corr.compute_rollout_correction_and_add_to_batch(batch, form(KEYS))
    assert same is batch and metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5
    assert batch.batch["response_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert batch.batch["rollout_is_weights"].shape == (2, 3)


@pytest.mark.parametrize("kind", ["struct", "dict", "object"])
def test_bypass_mode_lets_the_rollout_policy_stand_for_the_old_one(kind):
    batch = SimpleNamespace(batch={"rollout_log_probs": ROLLOUT})
    options = {"bypass_mode": True, "loss_type": "reinforce"}
    node = {"loss_mode": "vanilla"}
    if kind == "struct":
        node = OmegaConf.create(node)
        OmegaConf.set_struct(node, True)
    elif kind == "object":
        node = SimpleNamespace(**node)
    corr.apply_bypass_mode(batch, options, node)
    assert batch.batch["old_log_probs"] is ROLLOUT
    read = node.__getattribute__ if kind == "object" else node.__getitem__
    assert read("loss_mode") == "bypass_mode"
    assert read("rollout_correction")["loss_type"] == "reinforce"
    with pytest.raises(ValueError, match="rollout_log_probs"):
        corr.apply_bypass_mode(SimpleNamespace(batch={}), options, node)


def test_roles_are_written_as_short_names():
    names = [str(role) for role in Role]
    assert names[:7] == ["actor", "rollout", "actor_rollout", "critic", "ref", "rm", "actor_rollout_ref"]
    assert [Role.from_string(name) for name in names] == list(Role)
    with pytest.raises(ValueError, match="no role"):
        Role.from_string("judge")


def config(**keys):
    nodes = {
        "critic": {"enable": keys.pop("critic", None)},
        "algorithm": {"adv_estimator": keys.pop("adv", "grpo"), "use_kl_in_reward": keys.pop("reward_kl", False)},
        "actor_rollout_ref": {"actor": {"use_kl_loss": keys.pop("kl_loss", False)}},
    }
    return OmegaConf.create(nodes | keys)


def test_an_estimator_that_reads_values_needs_a_critic_unless_the_user_decides():
    assert roles.need_critic(config(adv="gae")) and not roles.need_critic(config(adv="rloo"))
    assert roles.need_critic(config(critic=True)) and not roles.need_critic(config(adv="gae", critic=False))


def test_any_kl_needs_the_reference_policy():
    assert not roles.need_reference_policy(config())
    assert roles.need_reference_policy(config(reward_kl=True)) and roles.need_reference_policy(config(kl_loss=True))


def test_a_reward_model_is_looked_for_in_both_places():
    for enable in (True, False):
        assert roles.need_reward_model(config(reward_model={"enable": enable})) is enable
        assert roles.need_reward_model(config(reward={"reward_model": {"enable": enable}})) is enable
