"""Launch scripts in the shapes that people publish run through `paddock run --plan` as they stand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_plan import shell

from paddock.cli import main
from paddock.config import tree
from paddock.errors import UserError
from paddock.loading.load import load

ARRAYS = """
#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import no_such_npu_library' 2>/dev/null && echo npu || echo gpu)}
rollout_tp=${ROLLOUT_TP:-}
rollout_tp=${rollout_tp:-2}
longest=$((1024 + 2048))
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
    data.train_batch_size=${BATCH:-512}
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.truncation='error'
)
ENGINE=(model_engine=megatron)
ACTOR=(
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((longest * 4 / 2))
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
)
REWARD=(
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len=512
)
case "$DEVICE" in
    gpu) ACTOR+=(actor_rollout_ref.rollout.name=vllm) ;;
    *) echo "no such device" >&2; exit 1 ;;
esac
EMPTY=()
LAUNCH=(python3)
if [ "${VERL_USE_UV:-1}" != 0 ]; then
    uv sync --frozen
    LAUNCH=(uv run --frozen python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${ENGINE[@]}" "${ACTOR[@]}" "${REWARD[@]}" "${EMPTY[@]}" \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 "$@"
"""
FLAGS = """
set -x
logs=$HOME/run.log
python3 -u -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B\\
    trainer.logger=['console','wandb'] \\
    trainer.n_gpus_per_node=8 \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 2>&1 | tee -i $logs
"""
PREPARES = """
cat > convert.py << END
raise SystemExit("not to be run")
END
pip install something-large
python convert.py || exit 7
python3 -m somebody.elses.module
ray stop --force
ray job submit --address=http://127.0.0.1:8265 --runtime-env=env.yaml -- python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo trainer.n_gpus_per_node=8
"""


def plan(tmp_path: Path, text: str, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "run.sh"
    script.write_text(text.lstrip())
    paddock = f"{sys.executable} -m paddock.cli"
    command = f'cd "{tmp_path}" && {paddock} run --plan "{script}" "$@"'
    return shell("bash", "-c", command, "bash", *more, HOME=str(tmp_path), **environment)


def test_arrays_case_arithmetic_and_an_environment_of_their_own(tmp_path):
    done = plan(tmp_path, ARRAYS, "--json", BATCH="256")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    group = answer["config"]["actor_rollout_ref"]
    assert answer["batch"]["prompts"] == 256
    assert group["actor"]["strategy"] == group["ref"]["strategy"] == "megatron"
    assert group["actor"]["ppo_max_token_len_per_gpu"] == 6144
    assert group["rollout"]["name"] == "vllm"
    assert answer["config"]["reward_model"]["reward_kwargs"]["overlong_buffer_cfg"]["len"] == 512
    assert answer["batch"]["train_rows"] == 7473 + 7500


def test_flags_of_hydra_joined_lines_and_a_pipe(tmp_path):
    done = plan(tmp_path, FLAGS)
    assert done.returncode == 0, done.stderr
    assert "megatron" in done.stdout and "Qwen/Qwen3-30B-A3B" in done.stdout
    assert "Memory of each GPU" in (tmp_path / "run.log").read_text()


def test_planning_starts_nothing_else_that_a_script_holds(tmp_path):
    done = plan(tmp_path, PREPARES)
    assert done.returncode == 0, done.stderr
    assert "Algorithm: rloo" in done.stdout
    passed_over = [line for line in done.stderr.splitlines() if "not run while planning" in line]
    assert [line.split("planning: ")[1] for line in passed_over] == [
        "pip install something-large",
        "python convert.py",
        "python3 -m somebody.elses.module",
        "ray stop --force",
    ]


def test_a_script_without_training_is_not_called_planned(tmp_path):
    done = plan(tmp_path, "python3 -m recipe.of.others algorithm.adv_estimator=grpo\n")
    assert done.returncode == 2
    assert "starts no training that can be planned" in done.stderr


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("model_engine=dp", "actor_rollout_ref.actor.strategy", "fsdp"),
        ("model_engine=megatron", "actor_rollout_ref.actor.strategy", "megatron"),
        ("reward.reward_kwargs.max_resp_len=9", "reward_model.reward_kwargs.max_resp_len", 9),
        ("reward.reward_model.rollout.response_length=7", "reward_model.rollout.response_length", 7),
        ("reward_model.sandbox_fusion_url='http://a/run'", "reward_model.sandbox_fusion.url", "http://a/run"),
        ("reward.reward_kwargs.method=flexible", "reward_model.compute_score_kwargs", {"method": "flexible"}),
        ("reward_model.model_path=/a/b", "reward_model.model.path", "/a/b"),
        ("reward_model.inference.prompt_length=5", "reward_model.rollout.prompt_length", 5),
        ("critic.fsdp.param_offload=True", "critic.model.fsdp_config.param_offload", True),
        (
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
            "actor_rollout_ref.actor.fsdp_config.dtype",
            "fp32",
        ),
    ],
)
def test_names_of_other_years_lead_to_the_field(given, key, value):
    loaded = load([given])
    assert tree.get(loaded.config, key) == value
    assert any(f"is called {key}" in warning for warning in loaded.warnings)


@pytest.mark.parametrize(
    "given",
    [
        "actor_rollout_ref.rollout.moe_tensor_parallel_size=2",
        "actor_rollout_ref.actor.profile_discrete=True",
        "actor_rollout_ref.ref.profiler.discrete=True",
        "profile.options.level=level1",
        "critic.profile_ranks=[1,2]",
        "critic.profiler={enable: True, tool_config: {npu: {level: level1}}}",
        "trainer.profile_steps=[3]",
        "global_profiler.global_tool_config.nsys.discrete=True",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.ref.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.ref.fsdp_config.mixed_precision={reduce_dtype: fp32}",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision=null",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32",
        "actor_rollout_ref.actor.megatron.grad_offload=True",
        "critic.megatron.dist_checkpointing_path=/a/b",
        "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template=True",
        "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=strict",
        "actor_rollout_ref.rollout.agent.num_workers=4",
        "reward_model.rollout.gpu_memory_utilization=0.8",
        "reward.reward_model.rollout.enforce_eager=False",
        "reward_model.megatron={tensor_model_parallel_size: 2}",
    ],
)
def test_what_has_no_effect_here_is_said_to_be_ignored(given):
    assert [warning for warning in load([given]).warnings if "is ignored:" in warning]


@pytest.mark.parametrize(
    ("given", "key", "reason"),
    [
        ("model_engine=veomni", "model_engine", "not a training engine"),
        ("actor_rollout_ref.actor.veomni.fsdp_size=8", "actor_rollout_ref.actor.veomni.fsdp_size", "veomni is not a"),
        ("critic.deepspeed_config.zero_stage=2", "critic.deepspeed_config.zero_stage", "deepspeed is not a"),
        ("actor_rollout_ref.rollout.name=trtllm", "actor_rollout_ref.rollout.name", "not one of the values"),
        (
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=bf16",
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype",
            "transformers makes them",
        ),
        ("actor_rollout_ref.model.hf_config_path=/a", "actor_rollout_ref.model.hf_config_path", "beside its weights"),
        ("actor@actor_rollout_ref.actor=mine", "actor@actor_rollout_ref.actor=mine", "chooses a config group"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_with_the_reason(given, key, reason):
    with pytest.raises(UserError) as error:
        load([given])
    assert error.value.key == key
    assert reason in error.value.reason
    assert error.value.fix


def test_a_scripts_data_may_be_on_another_machine(tmp_path):
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/mnt/own/rows.parquet "
    done = plan(tmp_path, command + "actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.n_gpus_per_node=8\n")
    assert done.returncode == 0, done.stderr
    assert "the number of training rows is not known" in done.stdout
    assert "/mnt/own/rows.parquet is not on this machine" in done.stdout


def launch(folder, name: str, text: str | bytes, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    command = [sys.executable, "-m", "paddock.cli", "run", *flags, name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize(("name", "text"), [("s.sh", ""), ("s.py", "# only words\n")])
def test_a_script_that_starts_nothing_of_ours_is_a_mistake(tmp_path, name, text):
    done = launch(tmp_path, name, text)
    assert done.returncode == 2 and f"paddock run {name}: starts nothing of Paddock's" in done.stderr
    planned = launch(tmp_path, name, text, "--plan")
    assert planned.returncode == 2 and "starts no training that can be planned" in planned.stderr


def test_a_script_that_calls_us_in_another_script_or_elsewhere_is_none(tmp_path):
    (tmp_path / "inner.sh").write_text("python3 -m verl.trainer.main_ppo --help || true\n")
    done = launch(tmp_path, "outer.sh", "bash inner.sh\n")
    assert done.returncode == 0 and "started no command" not in done.stderr
    far = launch(tmp_path, "far.sh", "true || ssh node python3 -m verl.trainer.main_ppo\n")
    assert far.returncode == 0 and "far.sh has ended, and started no command of Paddock's" in far.stderr


def test_a_scripts_own_exit_code_stays(tmp_path):
    assert launch(tmp_path, "s.sh", "exit 7\n").returncode == 7


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("s.sh", "touch ran\nif then\n", "cannot be run: s.sh: line 2: syntax error"),
        ("s.py", "open('ran', 'w')\ndef (:\n", "cannot be run: SyntaxError"),
        ("s.sh", b"touch ran\n\x00\x01", "is no script: it holds zero bytes"),
    ],
)
def test_what_no_interpreter_would_run_is_refused_before_it_begins(tmp_path, name, text, reason):
    done = launch(tmp_path, name, text)
    assert done.returncode == 2 and f"paddock run {name}: {reason}" in done.stderr and "fix:" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_recipe_whose_keys_are_ours_is_planned_by_the_config_beside_it(tmp_path):
    folder = tmp_path / "recipe" / "dapo" / "config"
    folder.mkdir(parents=True)
    (folder / "own_trainer.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\ndefaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref: {rollout: {n: 6}}\nalgorithm: {filter_groups: {metric: null}}\n"
    )
    command = "python3 -m recipe.dapo.main_dapo --config-path=config --config-name='own_trainer.yaml'"
    keys = "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"
    done = plan(tmp_path, f"{command} {keys} --json\n")
    assert done.returncode == 0, done.stderr
    group = json.loads(done.stdout)["config"]["actor_rollout_ref"]
    assert (group["rollout"]["n"], group["actor"]["policy_loss"]["loss_mode"]) == (6, "kl_cov")


def test_trainers_of_others_are_named_with_the_page_that_has_their_settings(tmp_path):
    called = "accelerate launch --num_processes 2 -m openrlhf.cli.train_ppo_ray --lr 1"
    done = launch(tmp_path, "s.sh", f"{called}\n", "--plan")
    assert done.returncode == 2
    assert "starts no training that can be planned: python3 -m openrlhf.cli.train_ppo_ray is a program" in done.stderr
    assert "docs/en/from_trl.md" in done.stderr
    done = launch(tmp_path, "s.sh", "python3 -m recipe.of.others a=1\n")
    assert done.returncode == 1 and "No module named 'recipe" in done.stderr
    assert "s.sh started no command of Paddock's: python3 -m recipe.of.others is a program of its own" in done.stderr


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("class_name: verl.tools.geo3k_tool.Geo3kTool", "Paddock has no verl.tools.geo3k_tool: write it yourself"),
        ("class_name: mine.Tool\n    config: {type: mcp}", "is a tool of an MCP server"),
        ("class_name: mine.Tool", ""),
    ],
)
def test_a_plan_names_tools_that_the_run_refuses_and_imports_none(tmp_path, entry, reason, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("open('ran', 'w')\n")
    (tmp_path / "tools.yaml").write_text(f"tools:\n  - {entry}\n")
    turns = "actor_rollout_ref.rollout.multi_turn"
    keys = [f"{turns}.enable=True", f"{turns}.tool_config_path=tools.yaml", "actor_rollout_ref.rollout.n=2"]
    assert main(["plan", "algorithm.adv_estimator=grpo", *keys]) == 0
    planned = capsys.readouterr().out
    assert (f"training refuses it: {turns}.tool_config_path=tools.yaml" in planned) == bool(reason)
    assert reason in planned and not (tmp_path / "ran").exists()
