"""Keys of verl's first surface (2025) and of projects that grew from it: taken, ignored or refused by their reason."""

from __future__ import annotations

from contextlib import suppress

import pytest

from paddock.config import tree
from paddock.errors import UserError
from paddock.loading import foreign
from paddock.loading.load import load

A, REF, RO = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
GRPO = ["algorithm.adv_estimator=grpo", f"{RO}.n=8"]


def test_a_launch_command_of_early_2025_loads_with_a_line_for_each_key_that_has_another_name():
    loaded = load(
        [
            *GRPO, f"{A}.fsdp_config.grad_offload=True", "critic.model.fsdp_config.grad_offload=False",
            f"{RO}.n_val=8", f"{RO}.val_temperature=0.6", f"{REF}.param_offload=True",
            "reward_model.param_offload=False", "+trainer.val_generations_to_log_to_wandb=3",
            "trainer.remove_previous_ckpt=True", f"{A}.checkpoint.contents=[model]",
        ]
    )  # fmt: skip
    config, validation = loaded.config, loaded.config.actor_rollout_ref.rollout.val_kwargs
    assert (validation.n, validation.temperature, validation.do_sample) == (8, 0.6, True)
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload
    assert config.trainer.log_val_generations == 3
    assert (config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep) == (1, 1)
    told = "\n".join(loaded.warnings)
    for said in (
        f"{A}.fsdp_config.grad_offload=True is ignored: gradients are freed",
        f"{RO}.n_val is called {RO}.val_kwargs.n here",
        f"{RO}.val_temperature=0.6 is {RO}.val_kwargs.temperature=0.6 {RO}.val_kwargs.do_sample=True",
    ):
        assert said in told


def test_a_validation_temperature_of_zero_stays_greedy():
    assert not load([f"{RO}.val_temperature=0"]).config.actor_rollout_ref.rollout.val_kwargs.do_sample


def test_keys_of_a_covariance_loss_move_into_its_section_and_a_percentage_becomes_a_share():
    loaded = load([*GRPO, f"{A}.loss_mode=kl_cov", f"{A}.k_percent=0.2", f"{A}.ppo_kl_coef=1"])
    loss = loaded.config.actor_rollout_ref.actor.policy_loss
    assert (loss.loss_mode, loss.kl_cov_ratio, loss.ppo_kl_coef) == ("kl_cov", pytest.approx(0.002), 1)
    loss = load([*GRPO, f"{A}.loss_mode=clip_cov", f"{A}.clip_cov_ub=40"]).config.actor_rollout_ref.actor.policy_loss
    assert (loss.loss_mode, loss.clip_cov_ub) == ("clip_cov", 40)


@pytest.mark.parametrize(
    ("argument", "feature"),
    [
        (f"{RO}.prefix_strategy=random", "demonstrations"),
        ("reward_model.prime_model.update=after", "implicit process rewards"),
        ("data.filter_accuracy=True", "bounds of their accuracy"),
        ("trainer.rejection_sample=True", "drawn anew"),
        (f"{A}.adaptive_entropy.enabled=True", "entropy bonus is constant"),
        ("retriever.url=http://127.0.0.1:8000", "search engine"),
        ("async_training.staleness_threshold=0.1", "in a pool of their own"),
        ("trainer.remove_clip=True", "cut"),
    ],
)
def test_what_changes_training_and_is_not_built_is_refused_by_its_name(argument, feature):
    with pytest.raises(UserError) as error:
        load([*GRPO, argument])
    assert feature in error.value.reason and error.value.fix
    name = argument.partition("=")[0]
    assert error.value.key == name


def test_their_values_that_ask_for_nothing_are_ignored():
    off = ("data.filter_accuracy", "trainer.rejection_sample", f"{A}.adaptive_entropy.enabled", "trainer.remove_clip")
    assert len(load([*GRPO, *(f"{key}=False" for key in off)]).warnings) >= len(off)


def test_arguments_of_a_manager_are_those_of_the_function_if_one_is_named(tmp_path):
    (tmp_path / "r.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, weights):\n  ..."
    )
    weights = "+reward_model.reward_kwargs.weights.accuracy=2"
    config = load([f"custom_reward_function.path={tmp_path}/r.py", weights]).config
    assert config.custom_reward_function.reward_kwargs == {"weights": {"accuracy": 2}}
    with pytest.raises(UserError, match="no such key"):
        load([weights])
    assert load(["reward_model.reward_kwargs.overlong_buffer_cfg.len=7"])  # a field of the schema is no argument


def test_all_keys_that_cannot_be_taken_are_told_at_once():
    with pytest.raises(UserError) as error:
        load(["data.nothing=1", "retriever.topk=3", "trainer.nonsense=2", "data.train_batch_size=8"])
    told = str(error.value)
    assert told.startswith("3 settings are refused:\n")
    for line in (
        "data.nothing=1: no such key; `paddock plan`",
        "retriever.topk=3: a search engine",
        "trainer.nonsense=2",
    ):
        assert f"\n  {line}" in told
    assert told.count("fix:") == 1


def test_a_key_that_is_null_in_a_file_is_not_set(tmp_path):
    (tmp_path / "mine.yaml").write_text("algorithm:\n  filter_groups:\n    metric: null\n")
    config = load(["--config-path", str(tmp_path), "--config-name", "mine"]).config
    assert config.algorithm.filter_groups.metric == "seq_reward"


def test_every_mapping_of_forks_leads_to_a_field():
    several = [rule for rule in foreign.rules().values() if isinstance(rule, foreign.Several)]
    for rule in {id(rule): rule for rule in several}.values():
        for value in (1, "colocate_async"):
            with suppress(UserError, ValueError):  # of some keys it is no value
                for key in rule.to("reward_model.reward_kwargs.x", value, {"custom_reward_function.path": "r.py"}):
                    assert tree.leaf_of(key), key
