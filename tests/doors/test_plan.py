"""`paddock plan` and the doors around it, as a user types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paddock.cli import main
from paddock.config import tree

GUIDE = {
    "gsm8k": """
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.train_batch_size=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.rollout.n=5 \\
    algorithm.kl_ctrl.kl_coef=0.001 \\
    trainer.total_epochs=15
""",
    "math": """
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\
    data.train_files=$HOME/data/math/train.parquet \\
    data.val_files=$HOME/data/math/test.parquet \\
    data.train_batch_size=512 \\
    data.max_response_length=2048 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=5e-7 \\
    actor_rollout_ref.rollout.n=8 \\
    algorithm.kl_ctrl.kl_coef=0.002 \\
    trainer.total_epochs=20
""",
    "mixed": """
gsm8k_train=$HOME/data/gsm8k/train.parquet
math_train=$HOME/data/math/train.parquet
train_files="['$gsm8k_train', '$math_train']"

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\
    data.train_files="$train_files" \\
    data.train_batch_size=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.rollout.n=6 \\
    trainer.total_epochs=20
""",
    "small memory": """
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\
    data.train_batch_size=512 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    trainer.n_gpus_per_node=8
""",
}
STEPS = {"gsm8k": 105, "math": 280, "mixed": 280, "small memory": 210}


def shell(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **paths, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


def test_a_command_of_the_guide_plans_with_one_word_replaced(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(GUIDE["mixed"].replace("verl.", "paddock."))
    done = shell("bash", str(script), PADDOCK_PLAN="1", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Algorithm: rloo" in done.stdout
    assert f"steps            {STEPS['mixed']}" in done.stdout


def test_commands_of_the_guide_plan_unchanged_through_run(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("\n".join(GUIDE.values()))
    done = shell(sys.executable, "-m", "paddock.cli", "run", "--plan", str(script), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [int(steps) for steps in re.findall(r"steps {12}(\d+)", done.stdout)] == [*STEPS.values()]


def test_run_hands_arguments_and_the_exit_code_on(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('set -e\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo "$@"\necho not reached\n')
    done = shell(sys.executable, "-m", "paddock.cli", "run", "--plan", str(script), "data.train_batch_sise=3")
    assert done.returncode == 2
    assert "did you mean data.train_batch_size?" in done.stderr
    assert "not reached" not in done.stdout


def test_the_example_script_plans_what_the_guide_says(tmp_path):
    done = shell("bash", str(ROOT / "examples/rloo_trainer/run_qwen2-7b.sh"), PADDOCK_PLAN="1", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "1024 prompts x 5 responses = 5120 rows" in done.stdout
    assert "4 optimizer step(s), 256 prompts each" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "data.train_bath_size=3"], "did you mean data.train_batch_size?"),
        (["train", "data.train_batch_size=three"], "data.train_batch_size=three: must be int"),
        (
            ["train", "trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.n=5", "data.train_batch_size=10"],
            "use a multiple of 8",
        ),
        (["train", "data.train_files=/nowhere/train.parquet", "trainer.device=cpu"], "\n  fix: check the path\n"),
        (["plan", "data.train_files=/nowhere/train.parquet"], "add --rows N"),
        (["plan", "algorithm.adv_estimator=rlooo"], "did you mean 'rloo'?"),
        (["plan", "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n=5"),
        (["plan", "--gpu", "potato"], "one of:"),
        (["plan", "--rows", "-3"], "--rows"),
        (["pln"], "did you mean `paddock plan`?"),
        (["run", "nothing.sh"], "nothing.sh: no such file"),
        (["data"], "which data set?"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_mistakes_are_answered_without_torch():
    code = "import sys; from paddock.cli import main; sys.exit(main(['train', 'data.x=1']) + ('torch' in sys.modules))"
    done = shell(sys.executable, "-c", code)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 2


def planned(arguments: list[str], capsys) -> dict:
    assert main(["plan", "--json", *arguments]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_plan_counts_rows_steps_and_roles(capsys, tmp_path):
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"prompt": "x"}\n' * 640)
    plan = planned(
        [
            f"data.train_files={rows}",
            "data.train_batch_size=64",
            "trainer.total_epochs=3",
            "trainer.n_gpus_per_node=8",
            "actor_rollout_ref.actor.use_kl_loss=True",
        ],
        capsys,
    )
    assert plan["batch"]["steps_per_epoch"] == 10
    assert plan["batch"]["total_steps"] == 30
    assert [role["role"] for role in plan["roles"]] == ["actor", "rollout", "reference", "critic"]


def test_plan_answers_for_hardware_that_is_not_here(capsys):
    large = planned(
        [
            "--config-name=ppo_megatron_trainer",
            "algorithm.adv_estimator=grpo",
            "--gpu=h100",
            "trainer.nnodes=64",
            "trainer.n_gpus_per_node=8",
            "actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V3",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=16",
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8",
            "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
            "--rows=20000",
            "data.train_files=/elsewhere/x.parquet",
        ],
        capsys,
    )
    assert large["roles"][0] == {
        "role": "actor",
        "engine": "megatron",
        "devices": 512,
        "rows_split": 4,
        "weights_split": 128,
    }
    assert large["batch"]["total_steps"] == 19 * 15
    small, one = (
        planned(
            [
                "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct",
                f"trainer.n_gpus_per_node={gpus}",
                "--gpu=a100",
                "--rows=9999",
            ],
            capsys,
        )["memory"]
        for gpus in (8, 1)
    )
    assert small["fits"]
    assert not one["fits"]


def test_memory_advice_makes_an_overfull_plan_fit(capsys):
    arguments = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct",
        "--gpu=a100",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80",
    ]
    first = planned(arguments, capsys)
    assert not first["memory"]["fits"]
    suggestions = [advice["suggestion"].split() for advice in first["advice"] if "memory" not in advice["suggestion"]]
    overrides = [word for words in suggestions if all("=" in word for word in words) for word in words]
    assert planned([*arguments, *overrides], capsys)["memory"]["fits"]


def _values(leaf: tree.Leaf) -> st.SearchStrategy:
    limits = leaf.metadata
    if "choices" in limits:
        return st.sampled_from(limits["choices"])
    low = limits.get("low", 0) + (1e-3 if "above" in limits else 0)
    return {
        bool: st.booleans(),
        bool | None: st.booleans(),
        int: st.integers(int(max(low, limits.get("low", 1))), int(limits.get("high", 1 << 20))),
        float: st.floats(max(low, limits.get("above", low) + 1e-3), limits.get("high", 10.0)),
        str: st.text("abc XYZ_-.:1", min_size=1, max_size=12).map(lambda text: f"'{text}'"),
    }[leaf.type]


FREE = (bool, bool | None, str, float, int)
HELD = (  # keys whose values depend on each other, or that name things which must exist
    "data.train_batch_size",
    "data.max_",
    "data.gen_batch",
    "data.truncation",
    "min_tokens",
    "ppo_m",
    "critic.enable",
    "critic.ppo",
    "strategy",
    "adv_estimator",
    "parallel_size",
    "token_len",
    "loss_mode",
    "rollout_correction",
    "top_k",
    "val_kwargs",
    "_freq",
    "resume_mode",
    "trainer.device",
    "n_gpus_per_node",
    "nnodes",
    "reward_model.enable",
    "distillation.enabled",
    "rollout.name",
    "lora.",
    "use_pf_ppo",
    "activation_offload",
    "gradient_checkpointing",
    "router_replay",
    "rollout.n",
    "use_dynamic_bsz",
    "_length",
    "max_samples",
)
KEYS = [leaf for key, leaf in tree.leaves().items() if leaf.type in FREE and not any(part in key for part in HELD)]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_valid_overrides_survive_a_round_trip_through_json(data, capsys, tmp_path):
    chosen = data.draw(st.lists(st.sampled_from(KEYS), max_size=6, unique_by=lambda leaf: leaf.key))
    estimator = data.draw(st.sampled_from(["gae", "grpo", "rloo", "remax"]))
    overrides = [f"{leaf.key}={data.draw(_values(leaf))}" for leaf in chosen]
    first = planned([f"algorithm.adv_estimator={estimator}", *overrides], capsys)
    (tmp_path / "again.yaml").write_text(json.dumps(first["config"]))
    again = planned(["--config-path", str(tmp_path), "--config-name", "again"], capsys)
    for part in ("config", "algorithm", "roles", "batch", "memory"):
        assert again[part] == first[part]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(
        st.one_of(
            st.text(max_size=20),
            st.builds(
                "{}{}={}".format,
                st.sampled_from(["", "+", "++", "~"]),
                st.sampled_from(sorted(tree.leaves())),
                st.text("ab01.,:[]{}$()'\"\\ =~-", max_size=12),
            ),
            st.sampled_from(
                ["--config-name", "--config-path", "-cp", "--gpu", "--rows", "a.b.c={", "data=[1", "~data", "hydra.x=1"]
            ),
        ),
        max_size=4,
    )
)
@example(words=["--config-path", "~\0"])
def test_garbage_never_gives_a_traceback(words, capsys):
    assert main(["plan", "--json", *words]) in (0, 2)
    capsys.readouterr()
