"""`paddock sft` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from paddock.cli import main
from paddock.commands.keys_of import SFT

OPTIM = "actor_rollout_ref.actor.optim"


def test_the_embedded_model_learns_the_warm_up_rows_and_leaves_a_model_that_transformers_loads(tmp_path, capsys):
    folder = tmp_path / "run"
    assert (
        main(["sft", "trainer.total_training_steps=12", "trainer.logger=file", f"trainer.default_local_dir={folder}"])
        == 0
    )
    out = capsys.readouterr()
    assert f"paddock train actor_rollout_ref.model.path={folder}/huggingface data.train_files=FILE" in out.out
    assert f"paddock generate {folder}/huggingface prompt=TEXT" in out.out
    assert "no effect" not in out.err
    losses = [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12 and losses[-1] < losses[0]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(folder / "huggingface")
    prompt = tokenizer("12+34=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
    left = [
        "global_step_12",
        "huggingface",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
        "report.html",
        "run.json",
    ]
    assert sorted(entry.name for entry in folder.iterdir()) == left


def test_the_module_is_the_same_door(tmp_path):
    command = [sys.executable, "-m", "paddock.commands.sft", "optim.lrr=1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2
    assert f"{OPTIM}.lrr=1: no such key" in done.stderr and f"did you mean {OPTIM}.lr" in done.stderr


def test_defaults_are_those_of_supervised_training_and_the_users_settings_win(tmp_path):
    config = SFT.load(["model=/some/model", "data=/some/rows.jsonl"]).config
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert config.trainer.default_local_dir == "checkpoints/paddock/sft"
    assert not config.critic.enable
    (tmp_path / "mine.yaml").write_text("trainer: {experiment_name: from_file}\ndata: {train_batch_size: 300}\n")
    files = ["--config-path", str(tmp_path), "--config-name", "mine"]
    config = SFT.load([*files, "model.path=/some/model", "optim.lr=3e-4"]).config
    assert config.trainer.default_local_dir == "checkpoints/paddock/from_file"
    assert config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 300
    assert config.actor_rollout_ref.actor.optim.lr == 3e-4
    assert config.actor_rollout_ref.model.path == "/some/model"


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_settings_of_reinforcement_learning_are_reported_not_needed(estimator):
    loaded = SFT.load([f"algorithm.adv_estimator={estimator}", "trainer.critic_warmup=3", "data.train_batch_size=10"])
    assert loaded.warnings == [
        "algorithm.adv_estimator has no effect on `paddock sft`",
        "trainer.critic_warmup has no effect on `paddock sft`",
    ]


def test_a_row_without_an_answer_is_one_message(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}\n')
    arguments = [f"data={tmp_path}/rows.jsonl", "model=builtin:tiny", f"trainer.default_local_dir={tmp_path}/run"]
    assert main(["sft", *arguments, "data.train_batch_size=1"]) == 2
    assert f"{tmp_path}/rows.jsonl row 0, column 'answer': there is no answer to learn" in capsys.readouterr().err
