"""Keys of verl's that count or follow what they count and follow there."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tiny_models import save_tiny

from paddock.commands.keys_of import SFT
from paddock.config.engine import OptimConfig
from paddock.engines.train.optim import lr_at
from paddock.loading.load import load
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import train
from paddock.verl.commands import ENGINE_SFT, Surface
from paddock.verl.main import supervise
from paddock.workers.roles import build

SMALL = [
    *("algorithm.adv_estimator=grpo", "data.train_batch_size=8", "data.train_max_samples=16"),
    *("data.val_max_samples=16", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
    *("trainer.logger=[file]", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_last=False"),
    "data.dataloader_num_workers=0",
]
ASKED, SAID = {"role": "user", "content": "2+3=?"}, {"role": "assistant", "content": "5"}


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    assert train(load([*SMALL, f"trainer.default_local_dir={folder}", *overrides]).config).finished
    return lines(folder)


# The length of a run


def test_a_run_ends_with_its_epochs_or_its_steps_whichever_comes_first(tmp_path, monkeypatch):
    schedules = []
    monkeypatch.setattr(
        "paddock.trainer.reinforcement.build",
        lambda config, tok, steps: schedules.append(steps) or build(config, tok, steps),
    )
    assert len(run(tmp_path / "epochs", "trainer.total_epochs=1", "trainer.total_training_steps=5")) == 2
    assert len(run(tmp_path / "steps", "trainer.total_epochs=9", "trainer.total_training_steps=3")) == 3
    assert schedules == [5, 3], "a schedule is as long as total_training_steps says, also in verl"


def test_steps_alone_take_as_many_epochs_as_they_need():
    steps = load(["algorithm.adv_estimator=grpo", "trainer.total_training_steps=500"]).config.trainer
    assert steps.total_epochs is None and steps.steps(per_epoch=2) == 500
    whole = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct"]
    assert load(whole).config.trainer.steps(per_epoch=2) == 30
    trainer = SFT.load(
        ["model=Qwen/Qwen2-7B-Instruct", "data=t.parquet", "trainer.total_training_steps=500"], here=False
    )
    assert trainer.config.trainer.steps(per_epoch=2) == 500


# Schedules, losses, seconds


def test_a_decay_ends_at_its_step_of_the_run_as_megatrons_does():
    config = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=100, lr_decay_steps=1000)
    assert [lr_at(step, config, 5000) for step in (100, 550, 1000, 1099)] == pytest.approx([1, 0.5, 0, 0])
    config = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps_ratio=0.1, lr_decay_steps=1000)
    assert [lr_at(step, config, 5000) for step in (50, 100)] == pytest.approx([0.5, 1])


def test_the_value_loss_is_aggregated_as_the_policy_loss_unless_it_is_set():
    actor, critic = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "critic.loss_agg_mode=token-mean"
    assert load([actor]).config.critic.loss_agg_mode == "seq-mean-token-sum"
    assert load([actor, critic]).config.critic.loss_agg_mode == "token-mean"


def test_the_seconds_of_a_step_leave_validation_out(tmp_path, monkeypatch):
    seen: list[tuple[bool, float]] = []

    def validate(self, tracker):
        seen.append(("step" in self.timer._running, self.timer.seconds["step"]))
        return {}

    monkeypatch.setattr(Trainer, "validate", validate)
    (line,) = run(tmp_path, "trainer.total_training_steps=1", "trainer.test_freq=1")
    assert seen == [(False, line["timing_s/step"])] and line["perf/time_per_step"] == line["timing_s/step"] > 0


# SFT


@pytest.fixture
def sft(tmp_path, monkeypatch):
    """Runs verl's command on conversations of which one is longer than 40 tokens."""
    monkeypatch.delenv("RANK", raising=False)
    rows = [{"messages": [ASKED, SAID]}] * 3 + [{"messages": [ASKED, SAID | {"content": "5" * 60}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    model = save_tiny(tmp_path / "model")

    def run(surface: Surface, *overrides: str) -> list[dict[str, float]]:
        given = [f"model.path={model}", f"data.train_files={tmp_path / 'rows.parquet'}", "data.train_batch_size=4",
                 "trainer.total_training_steps=2", "trainer.logger=file", "trainer.device=cpu",
                 "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={tmp_path / 'out'}"]  # fmt: skip
        assert supervise(surface, [*given, *overrides]) == 0
        return lines(tmp_path / "out")

    return run


@pytest.mark.parametrize("test_freq", [[], ["trainer.test_freq=-1"]])
def test_sft_of_verl_validates_after_its_last_step_alone(sft, tmp_path, test_freq):
    found = sft(ENGINE_SFT, f"data.val_files={tmp_path / 'rows.parquet'}", "data.max_length=128", *test_freq)
    assert [line["step"] for line in found if "val/loss" in line] == [2]


@pytest.mark.parametrize("truncation", [[], ["data.truncation=error"]])
def test_a_row_that_is_too_long_for_verls_sft_trainer_is_cut_at_its_end(sft, truncation):
    assert len(sft(ENGINE_SFT, "data.max_length=40", *truncation)) == 2
