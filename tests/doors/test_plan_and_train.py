"""What `paddock train` refuses, `paddock plan` refuses as well or says; both before anything is loaded."""

from __future__ import annotations

import json

import pytest

from paddock.cli import main
from paddock.commands import preflight
from paddock.facts.machine import Machine
from paddock.loading.load import load
from paddock.loading.rules.form import RULES, Scope

A, RO, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MEGATRON, REWARD = f"{A}.strategy=megatron", ("reward_model.enable=True", "reward_model.model.path=/no/model")
TINY = (f"{M}.path=builtin:tiny", "data.train_files=builtin:addition/train", "data.val_files=builtin:addition/test",
        "data.train_batch_size=64")  # fmt: skip
BARE = Machine("cpu", 0, None, 16 << 30, 2, frozenset())

BROKEN_RULES = [
    (("reward_model.reward_manager=rate_limited",), "reward_model.reward_manager=rate_limited"),
    (("algorithm.adv_estimator=grpo", f"{RO}.n=1"), f"{RO}.n=1"),
    (("algorithm.adv_estimator=rlooo",), "algorithm.adv_estimator=rlooo"),
    (("data.train_batch_size=48", f"{A}.ppo_mini_batch_size=36"), f"{A}.ppo_mini_batch_size=36"),
    ((f"{A}.clip_ratio=0",), f"{A}.clip_ratio=0"),
    ((f"{A}.policy_loss.loss_mode=dro",), f"{A}.policy_loss.dro_beta"),
    ((f"{A}.checkpoint.load_contents=[model]",), f"{A}.checkpoint.load_contents"),
    (("trainer.save_freq=0",), "trainer.save_freq=0"),
    (("reward_model.enable=True",), "reward_model.enable=True"),
    ((f"{M}.hf_config_path=/a",), f"{M}.hf_config_path=/a"),
    ((f"{A}.checkpoint.async_save=True",), f"{A}.checkpoint.async_save=True"),
    ((f"{A}.ppo_micro_batch_size=8",), f"{A}.ppo_micro_batch_size=8"),
]
UNTRAINED = [
    ((f"{RO}.name=vllm", f"{RO}.data_parallel_size=2"), f"{RO}.data_parallel_size=2"),
    ((f"{RO}.name=sglang", f"{RO}.checkpoint_engine.backend=nccl"), f"{RO}.checkpoint_engine.backend=nccl"),
    ((f"{A}.fsdp_config.dtype=fp16",), f"{A}.fsdp_config.dtype=fp16"),
    (("critic.model.fsdp_config.dtype=fp16",), "critic.model.fsdp_config.dtype=fp16"),
    ((f"{A}.fsdp_config.offload_policy=True",), f"{A}.fsdp_config.offload_policy=True"),
    ((f"{A}.strategy=single", "trainer.n_gpus_per_node=2"), f"{A}.strategy=single"),
    ((MEGATRON, "critic.megatron.dtype=fp16"), "critic.megatron.dtype=fp16"),
    ((MEGATRON, "actor_rollout_ref.numerics=exact"), "actor_rollout_ref.numerics=exact: its kernels"),
    ((f"+{M}.override_config.output_router_logits=True",), f"{M}.override_config.output_router_logits=True"),
    ((*REWARD, "reward_model.strategy=megatron"), "reward_model.strategy=megatron"),
    ((*REWARD, "reward_model.model.fsdp_config.dtype=fp16"), "reward_model.model.fsdp_config.dtype=fp16"),
    ((*REWARD, "reward_model.enable_resource_pool=True"), "reward_model.nnodes=0"),
    ((*REWARD, "reward_model.judge.source=engine", "reward_model.rollout.name=vllm"), "reward_model.rollout.name=vllm"),
    ((f"{RO}.name=vllm", f"{RO}.temperature=0.7", f"{RO}.top_p=0.9"), f"{RO}.temperature=0.7"),
    ((f"{RO}.name=sglang", f"{RO}.temperature=0.7", f"{RO}.logprobs_mode=raw_logprobs"), f"{RO}.logprobs_mode=raw"),
    ((f"{RO}.name=sglang", f"{RO}.scheduling_policy=priority"), f"{RO}.scheduling_policy=priority"),
    (("environment=builtin:guess", "algorithm.adv_estimator=optimal_token_baseline"), "=optimal_token_baseline"),
    (("environment=builtin:guess", f"{RO}.multi_turn.format=kimi"), f"{RO}.multi_turn.format=kimi"),
    (("environment=builtin:guess", f"{RO}.enable_rollout_routing_replay=True"), "enable_rollout_routing_replay=True"),
    (("environment=python:Mine", *TINY, "trainer.n_gpus_per_node=2"), "environment=python:Mine"),
]
ABSENT = [
    ((f"{RO}.name=vllm",), f"{RO}.name=vllm"),
    ((f"{M}.lora_rank=8",), f"{M}.lora_rank=8"),
    (("trainer.logger=[console,mlflow]",), "trainer.logger=mlflow"),
    ((*TINY, "trainer.n_gpus_per_node=8"), "8 processes need ray"),
    ((*TINY, "trainer.device=cuda"), "this machine has no accelerator"),
    ((*TINY, "trainer.device=npu"), "trainer.device=npu"),
]


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """No accelerator and no optional package, whatever this machine has."""
    monkeypatch.setattr(preflight, "this_machine", lambda: BARE)


def refusal_of_training(arguments, capsys) -> str:
    assert main(["train", "trainer.total_training_steps=1", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "fix:" in captured.err
    return captured.err


@pytest.mark.parametrize("command", ["train data.train_files", "eval data"], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no rows"),
        ("prompt,answer\n", "holds no rows"),
        ("q2,answer\n1,2\n", "has no column 'prompt'; it has 'q2', 'answer'"),
        ("question,reward_model\n1,2\n", "has no column 'prompt'; it has 'question', 'reward_model'"),
    ],
)
def test_a_file_that_no_run_can_read_is_refused_before_a_choice_is_told(command, text, named, tmp_path, capsys):
    (tmp_path / "mine.csv").write_text(text)
    name, _, key = command.partition(" ")
    assert main([name, f"{key}={tmp_path / 'mine.csv'}", "reward=exact_match"]) == 2
    said = capsys.readouterr()
    assert named in said.err and "mine.csv" in said.err and "importing torch" not in said.err and not said.out


@pytest.mark.parametrize(("arguments", "named"), BROKEN_RULES)
def test_a_config_that_breaks_a_rule_is_refused_by_both(arguments, named, capsys):
    trained = refusal_of_training(arguments, capsys)
    assert named in trained
    assert main(["plan", *arguments]) == 2
    assert capsys.readouterr().err == trained


@pytest.mark.parametrize(("arguments", "named"), [*UNTRAINED, *ABSENT])
def test_what_training_refuses_a_plan_says(arguments, named, capsys):
    trained = refusal_of_training(arguments, capsys)
    assert main(["plan", "--json", "--rows", "7473", *arguments]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    said = [note for note in notes if note.startswith(("training refuses it: ", "training does not start on this"))]
    assert [note for note in said if named in note]
    first = trained.removeprefix("paddock: ").splitlines()[0]
    assert any(first in note for note in said)


def test_eval_refuses_a_reward_model_that_training_refuses(capsys):
    judge = (*REWARD[:1], "reward_model.model.path=builtin:tiny", "reward_model.judge.source=engine")
    assert main(["eval", "builtin:tiny", "data=builtin:addition/test", *judge, "reward_model.rollout.name=vllm"]) == 2
    assert "reward_model.rollout.name=vllm: does not serve a judge" in capsys.readouterr().err


def test_every_refusal_of_training_is_in_the_table():
    """A rule of training that is added needs a case above."""
    for_training = [rule for rule in RULES if rule.scope in (Scope.TRAINING, Scope.SCORING)]
    broken = {preflight.tool_files_can_be_read}  # tests/environments has its files
    for arguments, _ in UNTRAINED:
        config = load(arguments).config
        broken |= {rule.check for rule in for_training if rule.error(config)}
    assert {rule.check.__name__ for rule in for_training if rule.check not in broken} == set()
