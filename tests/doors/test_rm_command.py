"""`paddock rm train` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from paddock.cli import main
from paddock.commands.keys_of import RM

OPTIM = "actor_rollout_ref.actor.optim"


def test_the_embedded_model_learns_the_built_in_pairs_and_leaves_a_reward_model(tmp_path, capsys):
    folder = tmp_path / "run"
    steps = ("trainer.total_training_steps=16", "trainer.test_freq=16", "data.val_max_samples=200")
    large = ("data.train_batch_size=128", "optim.lr=1e-3")  # what so few steps need
    assert main(["rm", "train", *steps, *large, "trainer.logger=file", f"trainer.default_local_dir={folder}"]) == 0
    out = capsys.readouterr()
    assert f"paddock train reward_model.enable=True reward_model.model.path={folder}/huggingface" in out.out
    assert "no effect" not in out.err
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["val/loss"] == pytest.approx(0.6931, abs=1e-4)
    assert lines[-1]["val/loss"] < lines[0]["val/loss"] and lines[-1]["val/accuracy"] > 0.55
    left = [
        "global_step_16",
        "huggingface",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
        "report.html",
        "run.json",
    ]
    assert sorted(entry.name for entry in folder.iterdir()) == left

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder / "huggingface")
    tokenizer = AutoTokenizer.from_pretrained(folder / "huggingface")
    assert model(**tokenizer("12+34=64<eos>", return_tensors="pt", return_token_type_ids=False)).logits.shape == (1, 1)

    settings = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.logger=file",
                "trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=False",
                f"trainer.default_local_dir={tmp_path}/ppo"]  # fmt: skip
    assert main(["train", *settings, "reward_model.enable=True", f"reward_model.model.path={folder}/huggingface"]) == 0
    (step,) = (json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines())
    assert step["reward/model/std"] > 0 and step["critic/score/mean"] == pytest.approx(
        step["reward/model/mean"], abs=1e-5
    )


def test_the_module_is_the_same_door():
    command = [sys.executable, "-m", "paddock.commands.rm", "optim.lrr=1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2
    assert f"{OPTIM}.lrr=1: no such key" in done.stderr and f"did you mean {OPTIM}.lr" in done.stderr


def test_what_shall_become_of_the_reward_model_must_be_said(capsys):
    for arguments in (["rm"], ["rm", "eval"]):
        assert main(arguments) == 2
        assert "paddock rm train" in capsys.readouterr().err


def test_defaults_are_those_of_preference_training_and_the_users_settings_win():
    config = RM.load(["model=/some/model", "data=/some/pairs.jsonl"]).config
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5 and config.trainer.total_epochs == 1
    assert config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 128
    assert config.trainer.default_local_dir == "checkpoints/paddock/rm"
    assert RM.load(["model=/some/model", "optim.lr=3e-6"]).config.actor_rollout_ref.actor.optim.lr == 3e-6


def test_settings_of_reinforcement_learning_are_reported_not_needed():
    assert RM.load(["trainer.critic_warmup=3"]).warnings == [
        "trainer.critic_warmup has no effect on `paddock rm train`"
    ]


def test_a_row_that_is_no_pair_is_one_message(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "2"}\n')
    arguments = [f"data={tmp_path}/rows.jsonl", "model=builtin:tiny", f"trainer.default_local_dir={tmp_path}/run"]
    assert main(["rm", "train", *arguments, "data.train_batch_size=1"]) == 2
    assert f"{tmp_path}/rows.jsonl row 0, column 'rejected': is the same as 'chosen'" in capsys.readouterr().err


def test_a_reward_model_is_not_taken_for_a_policy(tmp_path, capsys):
    run = tmp_path / "run"
    steps = ("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=False")
    assert main(["rm", "train", *steps, "trainer.logger=file", f"trainer.default_local_dir={run}"]) == 0
    capsys.readouterr()
    for folder in (run, run / "global_step_1", run / "global_step_1" / "reward_model"):
        assert main(["export", str(folder), str(tmp_path / "out")]) == 2
        assert "is a reward model, not a language model" in capsys.readouterr().err
    assert main(["generate", str(run), "prompt=1+1="]) == 2
    assert "is a reward model, not a language model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
