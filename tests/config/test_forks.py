"""In a checkout with a `verl` of its own a training command says which defaults differ, and what restores them."""

from __future__ import annotations

import pytest

from paddock.facts.compat import CHECKOUT
from paddock.loading.load import load

GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.model.path=org/model"]
DEFAULTS = """
data: {max_response_length: 512, train_batch_size: 1024, tokenizer: null}
actor_rollout_ref:
  model: {path: ~/models/other, enable_gradient_checkpointing: False}
  actor: {entropy_coeff: 0.001, grad_clip: 1.0, optim: {lr: 1e-6}, kl_loss_coef: 1e-3, ppo_micro_batch_size: 64}
  rollout: {val_temperature: 0.6, response_length: "${data.max_response_length}", gpu_memory_utilization: 0.5}
critic: {cliprange_value: 0.1}
algorithm: {lam: 1.0, kl_ctrl: {type: fixed, kl_coef: 0.001}, some_trick: 3}
trainer: {total_epochs: 30, test_freq: -1, total_training_steps: null, project_name: other}
"""
PAYS = "    if not self.config.actor_rollout_ref.actor.use_kl_loss:\n        batch = apply_kl_penalty(batch)\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    package = tmp_path / "verl"
    for folder in ("config", "ppo"):
        (package / "trainer" / folder).mkdir(parents=True)
    (package / "trainer" / "config" / "ppo_trainer.yaml").write_text(DEFAULTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CHECKOUT, str(package))
    return package


def told(*arguments):
    return [line for line in load([*GRPO, *arguments]).warnings if "restores it" in line]


def test_each_default_that_differs_and_matters_is_told_with_its_key(checkout):
    keys = [line.split()[0] for line in told()]
    assert sorted(keys) == [
        "actor_rollout_ref.actor.entropy_coeff",
        "actor_rollout_ref.rollout.val_kwargs.do_sample",
        "actor_rollout_ref.rollout.val_kwargs.temperature",
        "data.max_response_length",
        "trainer.test_freq",
        "trainer.total_epochs",
    ]
    said = "actor_rollout_ref.actor.entropy_coeff is 0.0 here and 0.001 in verl/trainer/config/ppo_trainer.yaml"
    assert f"{said}: actor_rollout_ref.actor.entropy_coeff=0.001 restores it" in told()


def test_what_the_command_sets_itself_is_not_told(checkout):
    lines = told("actor_rollout_ref.actor.entropy_coeff=0", "data.max_response_length=700", "trainer.test_freq=5")
    assert not any(name in line for line in lines for name in ("entropy_coeff", "response_length", "test_freq"))


def test_kl_that_is_paid_without_a_key_is_told_unless_a_term_is_there(checkout):
    trainer = checkout / "trainer" / "ppo" / "ray_trainer.py"
    trainer.write_text(f"# {PAYS.strip()}\n")
    assert not any("KL" in line for line in told())
    trainer.write_text(PAYS)
    [line] = [line for line in told("algorithm.kl_ctrl.kl_coef=0.005") if "KL" in line]
    assert "verl pays it (algorithm.kl_ctrl.kl_coef=0.005)" in line
    assert line.endswith("algorithm.use_kl_in_reward=True restores it")
    for decided in ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=False"):
        assert not any("KL" in line for line in told(decided))


def test_the_composed_file_of_later_versions_is_read(checkout):
    (checkout / "trainer" / "config" / "_generated_ppo_trainer.yaml").write_text("trainer: {total_epochs: 7}\n")
    assert [line.split(":")[0] for line in told()] == [
        "trainer.total_epochs is 15 here and 7 in verl/trainer/config/_generated_ppo_trainer.yaml"
    ]


def test_a_file_that_cannot_be_read_and_a_command_elsewhere_say_nothing(checkout, monkeypatch):
    (checkout / "trainer" / "config" / "ppo_trainer.yaml").write_text("a: [")
    assert told() == []
    monkeypatch.delenv(CHECKOUT)
    assert told() == []


def test_the_weight_of_a_term_that_is_off_has_no_effect():
    said = "algorithm.kl_ctrl.kl_coef=0.05 has no effect: algorithm.use_kl_in_reward=False"
    assert said in load([*GRPO, "algorithm.kl_ctrl.kl_coef=0.05"]).warnings
    on = load([*GRPO, "algorithm.kl_ctrl.kl_coef=0.05", "algorithm.use_kl_in_reward=True"])
    off = load([*GRPO, "algorithm.kl_ctrl.kl_coef=0"])
    assert not any("kl_coef" in line for loaded in (on, off) for line in loaded.warnings)
