"""Overrides, files, recipes and the machine become one config, and every key knows where it came from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paddock.config import tree
from paddock.config.recipes import ALIASES, ESTIMATORS
from paddock.errors import UserError
from paddock.facts.machine import GIB, Machine
from paddock.loading.load import load

LAPTOP = Machine("cpu", 0, None, 16 * GIB, 4, frozenset())
ONE_GPU = Machine("cuda", 1, 141 * GIB, 128 * GIB, 16, frozenset())
EIGHT_GPUS = Machine("cuda", 8, 80 * GIB, 1024 * GIB, 96, frozenset({"vllm", "ray", "wandb"}))
GUIDE = ["actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct", "data.train_files=$HOME/data/gsm8k/train.parquet"]


def value(loaded, key):
    return tree.get(loaded.config, key)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("data.train_batch_size=512", "data.train_batch_size", 512),
        ("+data.train_batch_size=512", "data.train_batch_size", 512),
        ("++data.train_batch_size=512", "data.train_batch_size", 512),
        ("~trainer.total_training_steps", "trainer.total_training_steps", None),
        ("data.train_files=['a.parquet','b.parquet']", "data.train_files", ["a.parquet", "b.parquet"]),
        ('trainer.logger=["console","wandb"]', "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("trainer.project_name='a b: c'", "trainer.project_name", "a b: c"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr", 1e-6),
        ("trainer.project_name=${trainer.experiment_name}", "trainer.project_name", "gae"),
        ("trainer.project_name=${oc.env:PADDOCK_TEST}", "trainer.project_name", "from the environment"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
            "actor_rollout_ref.rollout.engine_kwargs.vllm",
            {"disable_mm_preprocessor_cache": True},
        ),
        (
            "+data.apply_chat_template_kwargs={reasoning_effort:medium}",
            "data.apply_chat_template_kwargs",
            {"reasoning_effort": "medium"},
        ),
        ("algorithm.kl_ctrl={kl_coef:0.5,type:adaptive}", "algorithm.kl_ctrl.kl_coef", 0.5),
        ("actor_rollout_ref.actor.grad_clip=0.3", "actor_rollout_ref.actor.optim.clip_grad", 0.3),
    ],
)
def test_hydra_override_grammar(override, key, expected, monkeypatch):
    monkeypatch.setenv("PADDOCK_TEST", "from the environment")
    assert value(load([override], LAPTOP), key) == expected


def test_yaml_may_write_dotted_keys_and_the_command_line_wins(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "algorithm:\n  adv_estimator: rloo\n  kl_ctrl.kl_coef: 0.002\n"
        "actor_rollout_ref:\n  actor:\n    optim.lr: 5e-7\n  rollout: {n: 8}\n"
    )
    loaded = load(["--config-path", str(tmp_path), "--config-name=mine", "actor_rollout_ref.rollout.n=6"], LAPTOP)
    assert value(loaded, "algorithm.kl_ctrl.kl_coef") == 0.002
    assert value(loaded, "actor_rollout_ref.actor.optim.lr") == 5e-7
    assert value(loaded, "actor_rollout_ref.rollout.n") == 6
    assert loaded.origins["algorithm.kl_ctrl.kl_coef"].endswith("mine.yaml")
    assert loaded.origins["actor_rollout_ref.rollout.n"] == "command line"


def test_the_yaml_of_the_guide_is_read_as_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text(
        "data:\n  train_files: $HOME/data/gsm8k/train.parquet\n  val_files: $HOME/data/gsm8k/test.parquet\n"
        "actor_rollout_ref:\n  actor:\n    optim.lr: 1e-6\n    fsdp_config:\n      param_offload: False\n"
        "trainer:\n  n_gpus_per_node: 8\n"
    )
    loaded = load(["-cp", str(tmp_path), "-cn", "c"], LAPTOP)
    assert value(loaded, "data.train_files") == f"{tmp_path}/data/gsm8k/train.parquet"


@pytest.mark.parametrize("name", ["ppo_megatron_trainer", "ppo_megatron_trainer.yaml"])
def test_megatron_config_name_turns_every_role_to_megatron(name):
    loaded = load(["--config-path=config", f"--config-name={name}", *GUIDE], LAPTOP)
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        assert value(loaded, f"{role}.strategy") == "megatron"


def test_keys_left_unset_follow_the_recipe_of_the_algorithm():
    rloo = load(["algorithm.adv_estimator=rloo", *GUIDE], LAPTOP)
    assert {key: value(rloo, key) for key, origin in rloo.origins.items() if origin == "recipe rloo"} == ESTIMATORS[
        "rloo"
    ].values
    grpo = load(["algorithm.adv_estimator=grpo", *GUIDE], LAPTOP)
    assert value(grpo, "actor_rollout_ref.rollout.n") == 5
    assert value(grpo, "algorithm.use_kl_in_reward") is False
    ppo = load(GUIDE, LAPTOP)
    assert value(ppo, "actor_rollout_ref.rollout.n") == 1
    assert value(ppo, "critic.enable") is True


@pytest.mark.parametrize("name", [*ESTIMATORS, *ALIASES])
def test_every_estimator_loads_with_its_recipe_alone(name):
    extra = ["algorithm.gdpo_reward_keys=[accuracy,format]"] if name == "gdpo" else []
    load([f"algorithm.adv_estimator={name}", *extra], LAPTOP)
    load([f"algorithm.adv_estimator={name}", *GUIDE, *extra], EIGHT_GPUS)


def test_a_run_that_names_nothing_is_the_embedded_default():
    loaded = load(["algorithm.adv_estimator=grpo"], LAPTOP)
    assert value(loaded, "actor_rollout_ref.model.path") == "builtin:tiny"
    assert (value(loaded, "trainer.device"), value(loaded, "trainer.n_gpus_per_node")) == ("cpu", 1)


def test_hardware_decides_devices_engine_and_loggers():
    laptop, gpu, node = (load(GUIDE, machine) for machine in (LAPTOP, ONE_GPU, EIGHT_GPUS))
    names = (
        "trainer.device",
        "trainer.n_gpus_per_node",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "trainer.logger",
    )
    assert [value(laptop, key) for key in names] == ["cuda", 8, "embedded", 1, ["console"]]
    assert [value(gpu, key) for key in names] == ["cuda", 1, "embedded", 1, ["console"]]
    assert [value(node, key) for key in names] == ["cuda", 8, "vllm", 2, ["console", "wandb"]]
    small = load(["actor_rollout_ref.model.path=HuggingFaceTB/SmolLM2-135M-Instruct"], LAPTOP)
    assert value(small, "trainer.device") == "cpu"


def test_micro_batches_follow_a_token_budget_unless_a_row_count_is_set():
    budget = load(GUIDE, LAPTOP)
    assert value(budget, "actor_rollout_ref.actor.use_dynamic_bsz") is True
    rows = load([*GUIDE, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"], LAPTOP)
    assert value(rows, "actor_rollout_ref.actor.use_dynamic_bsz") is False
    assert value(rows, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz") is True
    both = load(
        [
            *GUIDE,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
        ],
        LAPTOP,
    )
    assert any("ppo_micro_batch_size_per_gpu=32 is not used" in warning for warning in both.warnings)


def test_a_default_mini_batch_shrinks_with_the_batch_and_a_written_one_does_not():
    assert value(load([*GUIDE, "data.train_batch_size=64"], LAPTOP), "critic.ppo_mini_batch_size") == 64
    with pytest.raises(UserError, match=r"only data\.train_batch_size=64 prompts"):
        load([*GUIDE, "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=128"], LAPTOP)


def test_keys_that_this_run_does_not_read_are_named():
    loaded = load(
        [
            *GUIDE,
            "algorithm.adv_estimator=rloo",
            "critic.optim.lr=1e-5",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.model.lora.merge=True",
        ],
        LAPTOP,
    )
    assert any("critic.optim.lr has no effect" in warning for warning in loaded.warnings)
    assert any("lora.merge has no effect: the actor has no adapters" in warning for warning in loaded.warnings)
    assert any("megatron.tensor_model_parallel_size has no effect" in warning for warning in loaded.warnings)


def test_tools_beside_an_environment_are_named_as_unread():
    tools = "actor_rollout_ref.rollout.multi_turn.function_tool_path=calculator"
    (said,) = [warning for warning in load(["environment=builtin:guess", tools]).warnings if "no effect" in warning]
    assert "an environment has its own tools" in said
    alone = load(["actor_rollout_ref.rollout.multi_turn.enable=True", tools]).warnings
    assert [warning for warning in alone if "no effect" in warning] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("checkpoint_engine.backend", "nccl"), ("gpu_memory_utilization", "0.4"), ("engine_kwargs.vllm", "{seed: 1}")],
)
def test_a_key_that_only_copies_of_the_weights_read_says_so(name, value):
    """`embedded` runs the actor's own weights: nothing is served, sent or shared."""
    warnings = load([f"actor_rollout_ref.rollout.{name}={value}"]).warnings
    assert [warning.split()[0] for warning in warnings if "runs the actor's own" in warning] == [
        f"actor_rollout_ref.rollout.{name}"
    ]


def test_defaults_lists_may_not_go_in_circles(tmp_path):
    (tmp_path / "a.yaml").write_text("defaults: [b]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a]\n")
    with pytest.raises(UserError):
        load(["--config-path", str(tmp_path), "--config-name", "a"], LAPTOP)


def test_config_imports_no_torch():
    import subprocess
    import sys

    code = "import sys, paddock.loading.load as m; m.load(['data.shuffle=True']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_a_cpu_takes_small_micro_batches_unless_the_user_says_otherwise():
    actor, critic = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"
    ref, forward = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"
    short = ["trainer.device=cpu", "data.max_prompt_length=100", "data.max_response_length=200"]
    by_default = load([*GUIDE, *short], LAPTOP)
    assert [value(by_default, key) for key in (actor, ref, critic, forward)] == [1280] * 4
    asked = load([*GUIDE, *short, f"{actor}=5000"], LAPTOP)
    assert [value(asked, key) for key in (actor, ref, critic, forward)] == [5000, 5000, 1280, 1280]
    long = load([*GUIDE, "trainer.device=cpu", "data.max_prompt_length=1000", "data.max_response_length=1000"], LAPTOP)
    assert value(long, actor) == 4000  # a pair of sequences
    on_gpu = load([*GUIDE, *short[1:]], replace(ONE_GPU, device_memory=None))
    assert [value(on_gpu, key) for key in (actor, ref, critic)] == [16384, 16384, 32768]


def test_a_whole_number_is_a_number_where_a_text_may_stand_too():
    key = "algorithm.rollout_correction.rollout_is_threshold"
    found = load([f"{key}=2"]).config.algorithm.rollout_correction.rollout_is_threshold
    assert found == 2.0 and isinstance(found, float)
