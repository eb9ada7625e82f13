"""verl's names for the trainer's steps reach Paddock's, and its class runs Paddock's trainer."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from paddock.algorithms.advantages import compute_advantages
from paddock.algorithms.kl import AdaptiveKL, penalise
from paddock.config.schema import AlgorithmConfig
from paddock.errors import UserError
from paddock.loading.load import load

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
trainer, protocol = import_module("verl.trainer.ppo.ray_trainer"), import_module("verl.protocol")
algos = import_module("verl.trainer.ppo.core_algos")

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]])


def proto(uids=("a", "a", "b", "b"), **columns):
    random = torch.Generator().manual_seed(0)

    def draw():
        return torch.rand(4, 3, generator=random) * MASK

    tensors = {
        "responses": torch.ones(4, 3, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.long), MASK], 1),
        "token_level_scores": torch.tensor([[0, 0, 1.0], [0, 0.0, 0], [2.0, 0, 0], [0, 1.0, 0]]),
        "old_log_probs": -draw(),
        "ref_log_prob": -draw(),
        "values": draw(),
        "sum_pi_squared": draw(),
        "reward_baselines": torch.tensor([0.5, 0.5, 1.0, 1.0]),
    }
    tensors["token_level_rewards"] = tensors["token_level_scores"]
    return protocol.DataProto.from_dict(tensors | columns, {"uid": np.array(uids, dtype=object)})


def test_the_response_mask_is_the_end_of_the_attention_mask():
    assert torch.equal(trainer.compute_response_mask(proto()), MASK)


# KL.


@pytest.mark.parametrize("kind", ["kl", "low_var_kl", "k2"])
def test_the_kl_penalty_is_paddocks_and_moves_the_controller(kind):
    theirs, ours = algos.AdaptiveKLController(0.2, 0.1, 100), AdaptiveKL(0.2, 0.1, 100)
    data, metrics = trainer.apply_kl_penalty(proto(response_mask=MASK), theirs, kl_penalty=kind)
    expected, expected_metrics = penalise(protocol.to_batch(proto()), kind, ours)
    torch.testing.assert_close(data.batch["token_level_rewards"], expected.need("rewards"))
    assert metrics == expected_metrics and metrics["actor/reward_kl_penalty_coeff"] == 0.2
    assert theirs.value == ours.coefficient != 0.2


def test_the_kl_penalty_by_hand_with_a_controller_of_ones_own():
    seen = []
    controller = SimpleNamespace(value=0.5, update=lambda current_kl, n_steps: seen.append((current_kl, n_steps)))
    data = SimpleNamespace(
        batch={
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "token_level_scores": torch.tensor([[0.0, 1.0], [2.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0], [-1.0, -9.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -2.5], [-3.0, -1.0]]),
        }
    )
    same, metrics = trainer.apply_kl_penalty(data, controller)
    assert same is data
    torch.testing.assert_close(data.batch["token_level_rewards"], torch.tensor([[-0.25, 0.75], [1.0, 0.0]]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.5 + 2.0) / 2)
    assert seen == [(pytest.approx(1.25), 2)]


# Advantages.


@pytest.mark.parametrize("name", sorted(e.value for e in algos.AdvantageEstimator if e.value != "gdpo"))
def test_advantages_are_paddocks_whatever_the_estimator(name):
    config = OmegaConf.create({"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": False})
    data = trainer.compute_advantage(proto(), algos.AdvantageEstimator(name), 0.9, 0.8, 2, False, config)
    algorithm = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=False)
    expected = compute_advantages(protocol.to_batch(proto()), algorithm)
    torch.testing.assert_close(data.batch["advantages"], expected.need("advantages"))
    torch.testing.assert_close(data.batch["returns"], expected.need("returns"))
    assert torch.equal(data.batch["response_mask"], MASK)


def test_grpo_by_hand():
    data = trainer.compute_advantage(proto(), "grpo", norm_adv_by_std_in_grpo=False)
    assert data.batch["advantages"].tolist() == [[0.5] * 3, [-0.5, -0.5, 0], [0.5, 0, 0], [-0.5, -0.5, 0]]


def test_gdpo_reads_its_components_from_the_batch():
    data = proto()
    data.non_tensor_batch |= {"accuracy": np.array([1.0, 0, 1, 0]), "format": np.array([0.0, 1, 1, 0])}
    config = {"gdpo_reward_keys": ["accuracy", "format"], "gdpo_reward_weights": [1.0, 0.5]}
    found = trainer.compute_advantage(data, "gdpo", config=config).batch["advantages"]
    rows = torch.tensor([0.5, -0.5, 1.5, -1.5]) / 0.5**0.5 / 2  # accuracy counts once, format by half
    x = rows[:, None].expand_as(MASK)[MASK != 0]
    torch.testing.assert_close(found[MASK != 0], (x - x.mean()) / x.std(), rtol=1e-4, atol=1e-4)


def test_what_is_not_given_is_read_from_the_config_and_then_a_default():
    def returns(**given):
        return trainer.compute_advantage(proto(), "reinforce_plus_plus", **given).batch["returns"][0].tolist()

    assert returns(config={"gamma": 0.5}) == pytest.approx([0.25, 0.5, 1.0])
    assert returns(gamma=0.1, config={"gamma": 0.5}) == pytest.approx([0.01, 0.1, 1.0])
    assert returns() == [1.0, 1.0, 1.0]


def test_needs_are_checked_as_in_a_run():
    with pytest.raises(UserError, match="4 prompts have only one"):
        trainer.compute_advantage(proto(uids=("a", "b", "c", "d")), "grpo")
    with pytest.raises(UserError, match="use_pf_ppo"):
        trainer.compute_advantage(proto(), "gae", config={"use_pf_ppo": True})
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        trainer.compute_advantage(proto(), "gpro")


@pytest.mark.parametrize("name", ["gae", "remax", "reinforce_plus_plus", "optimal_token_baseline"])
def test_trap_10_a_rejected_last_token_leaves_its_reward_to_the_one_before(name):
    """As after compute_rollout_correction_and_add_to_batch, which edits `response_mask`."""
    edited = MASK.clone()
    edited[0, 2] = 0
    data = trainer.compute_advantage(proto(response_mask=edited), name)
    assert data.batch["returns"][0, 1].item() == pytest.approx(1.0), "the score on the rejected token"
    assert data.batch["advantages"][0, 2] == data.batch["returns"][0, 2] == 0


def test_an_estimator_written_for_verl_is_found(monkeypatch):
    estimators = import_module("paddock.algorithms.advantages").ESTIMATOR
    monkeypatch.setattr(estimators, "_entries", dict(estimators._entries))
    monkeypatch.setitem(algos.ADV_ESTIMATOR_REGISTRY, "doubled", None)

    @algos.register_adv_est("doubled")
    def doubled(token_level_rewards, response_mask, index, config=None, **kwargs):
        advantage = 2 * token_level_rewards.sum(-1)[:, None] * response_mask
        return advantage, advantage

    data = trainer.compute_advantage(proto(), "doubled")
    assert data.batch["advantages"][2].tolist() == [4.0, 0.0, 0.0]


# The trainer.


def small(folder) -> dict:
    return {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 4, "dataloader_num_workers": 0},
        "actor_rollout_ref": {"rollout": {"n": 2}, "actor": {"ppo_mini_batch_size": 4}},
        "trainer": {
            "total_training_steps": 1, "test_freq": -1, "val_before_train": False, "logger": ["file"],
            "default_local_dir": str(folder),
        },
    }  # fmt: skip


def test_fit_runs_paddocks_trainer(tmp_path):
    run = trainer.RayPPOTrainer(OmegaConf.create(small(tmp_path)), None, role_worker_mapping=None)
    run.init_workers()
    assert run.fit() is True
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 1 and row["actor/skipped"] == 0


def test_a_mapping_of_keys_is_read_as_a_config_file_is(tmp_path):
    flat = ["algorithm.adv_estimator=grpo", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", f"trainer.default_local_dir={tmp_path}",
            "data.dataloader_num_workers=0", "trainer.logger=[file]", "trainer.total_training_steps=1",
            "trainer.test_freq=-1", "trainer.val_before_train=False"]  # fmt: skip
    expected = load(flat).config
    assert trainer.RayPPOTrainer(small(tmp_path)).config == expected
    assert trainer.RayPPOTrainer(expected).config is expected
    with pytest.raises(UserError, match=r"did you mean algorithm.adv_estimator"):
        trainer.RayPPOTrainer(OmegaConf.create({"algorithm": {"adv_estimater": "grpo"}}))


def test_what_the_config_decides_is_refused_by_name_with_its_key(tmp_path):
    with pytest.raises(UserError) as caught:
        trainer.RayPPOTrainer(small(tmp_path), object(), {"ActorRollout": object()}, reward_fn=print)
    assert "tokenizer, role_worker_mapping, reward_fn" in caught.value.reason
    assert "custom_reward_function.path" in caught.value.fix and "val_dataset" not in caught.value.fix
    with pytest.raises(TypeError, match="no arguments"):
        trainer.RayPPOTrainer(small(tmp_path), judge=object())
    with pytest.raises(UserError, match=r"ResourcePoolManager[\s\S]*trainer.nnodes"):
        from verl.trainer.ppo.ray_trainer import ResourcePoolManager  # noqa: F401
    assert trainer.Role.from_string("critic").name == "Critic" and not hasattr(trainer, "Worker")
