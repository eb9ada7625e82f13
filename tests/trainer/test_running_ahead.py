"""Whole runs whose rollouts run ahead: what they train, what corrects it, and that they go on where they stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paddock.config.roles import RATIO_LOSSES
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.trainer.lifecycle import Listeners
from paddock.trainer.reinforcement import REINFORCEMENT, train
from paddock.trainer.run import open_training

STEPS = 6
SMALL = [
    "algorithm.adv_estimator=grpo", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", "trainer.save_freq=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.test_freq=-1", "trainer.val_before_train=False",
    "trainer.logger=[file]", "data.dataloader_num_workers=0", "actor_rollout_ref.rollout.max_num_seqs=48",
]  # fmt: skip
PPO = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
       "critic.ppo_mini_batch_size=4"]  # fmt: skip
OFF = "training/off_policy/"


def run(folder: Path, *overrides: str, steps: int = STEPS) -> list[dict[str, float]]:
    keys = [*SMALL, f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}", *overrides]
    assert train(load(keys).config).finished
    return metrics_of(folder)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Returns the metrics of each step, but for what depends on how long things took."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if not name.startswith(("timing", "perf"))} for row in rows]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}" / "actor" / "model.safetensors")


def back_to(folder: Path, step: int, last: int) -> None:
    """Takes the checkpoints behind a step away."""
    for later in range(step + 1, last + 1):
        shutil.rmtree(folder / f"global_step_{later}")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


@pytest.mark.parametrize("keys", [[], PPO], ids=["grpo", "ppo"])
def test_a_run_that_goes_on_at_any_step_equals_the_one_that_was_not_stopped(keys, tmp_path):
    whole = tmp_path / "whole"
    rows = run(whole, "algorithm.staleness=2", *keys)
    assert max(row[f"{OFF}trajectory_staleness_worst/max"] for row in rows) == 2
    assert any(row["rollout/window/carried_tokens"] for row in rows)
    for stopped in (1, 2, 4) if keys else range(1, STEPS):
        folder = tmp_path / f"stopped_{stopped}"
        shutil.copytree(whole, folder)
        back_to(folder, stopped, STEPS)
        assert run(folder, "algorithm.staleness=2", *keys) == rows
        for name, tensor in weights(whole, STEPS).items():
            assert torch.equal(tensor, weights(folder, STEPS)[name]), (stopped, name)


def test_each_step_trains_the_prompts_of_the_run_in_which_nothing_runs_ahead(tmp_path):
    dumps = {}
    for staleness in (0, 1, 4):
        folder = tmp_path / str(staleness)
        run(folder, f"algorithm.staleness={staleness}", f"trainer.rollout_data_dir={folder}/rollouts")
        files = sorted((folder / "rollouts").glob("*.jsonl"), key=lambda path: int(path.stem))
        dumps[staleness] = [[json.loads(line)["prompt"] for line in file.read_text().splitlines()] for file in files]
    assert len(dumps[0]) == STEPS and dumps[0] == dumps[1] == dumps[4]


def test_the_age_of_tokens_is_counted_in_updates_and_bounded(tmp_path):
    rows = run(tmp_path, "algorithm.staleness=1")
    for row in rows:
        assert 0 <= row[f"{OFF}trajectory_staleness/min"] <= row[f"{OFF}trajectory_staleness_worst/max"] <= 1
        assert row[f"{OFF}trajectory_spans/max"] <= 2
    assert rows[0][f"{OFF}trajectory_staleness_worst/max"] == 0 and rows[0][f"{OFF}ess"] == pytest.approx(1)
    assert any(row["rollout_corr/kl"] != 0 and row[f"{OFF}ess"] < 1 for row in rows[1:])


def test_a_smaller_staleness_drains_the_window_of_the_checkpoint(tmp_path):
    run(tmp_path, "algorithm.staleness=4", steps=12)
    back_to(tmp_path, 3, 12)
    rows = run(tmp_path, "algorithm.staleness=1", steps=12)
    ages = [row[f"{OFF}trajectory_staleness_worst/max"] for row in rows]
    assert max(ages[3:7]) > 1 and max(ages[8:]) <= 1


def test_what_parts_of_responses_were_drawn_under_stays_while_they_wait(tmp_path):
    run(tmp_path, "algorithm.staleness=2")
    back_to(tmp_path, 3, STEPS)
    with pytest.raises(UserError, match="responses that are drawn in part under it") as error:
        run(tmp_path, "algorithm.staleness=2", "actor_rollout_ref.rollout.temperature=0.5")
    assert error.value.key == "actor_rollout_ref.rollout.temperature"
    run(tmp_path / "other", "algorithm.staleness=0")
    back_to(tmp_path / "other", 3, STEPS)
    assert len(run(tmp_path / "other", "actor_rollout_ref.rollout.temperature=0.5")) == STEPS


@pytest.mark.parametrize("loss", sorted({*RATIO_LOSSES, "gpg", "reinforce"}))
@pytest.mark.parametrize("anchor", ["behaviour", "decoupled"])
def test_what_drew_a_token_moves_the_gradient_of_every_loss(loss, anchor, tmp_path):
    keys = [*SMALL, f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}", "algorithm.staleness=1",
            "actor_rollout_ref.actor.policy_loss.dro_beta=0.1", "trainer.total_training_steps=3",
            "algorithm.rollout_correction.rollout_is_threshold=1000.0"]  # fmt: skip
    if anchor == "decoupled" or loss not in RATIO_LOSSES:
        keys.append("algorithm.rollout_correction.rollout_is=token")
    plain, moved = (after_one_update(tmp_path / name, keys, shift) for name, shift in (("a", 0.0), ("b", 0.3)))
    assert any(not torch.equal(plain[name], moved[name]) for name in plain)


def test_at_no_age_both_anchors_take_the_step_of_today(tmp_path):
    keys = [*SMALL, "trainer.total_training_steps=3"]
    today = after_one_update(tmp_path / "today", keys, 0.0)
    for name, more in (("behaviour", ()), ("decoupled", ["algorithm.rollout_correction.rollout_is=token"])):
        found = after_one_update(tmp_path / name, [*keys, "algorithm.staleness=1", *more], 0.0)
        for key, tensor in today.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5)  # a step of Adam is 1e-3


def after_one_update(folder: Path, keys: list[str], shift: float) -> dict[str, torch.Tensor]:
    """Returns the weights after the first step; `shift` is taken from the log-probs of every other row's weights."""
    config = load([*keys, f"trainer.default_local_dir={folder}"]).config
    with open_training(config, REINFORCEMENT, {}, Listeners()) as training:
        trainer = training.opened()
        trainer.step_no += 1
        batch, _ = trainer.collector.collect(1, trainer.timer, trainer.roles.generating)
        drawn = batch.need("rollout_log_probs")
        drawn[::2] -= shift
        batch, _ = trainer.with_advantages(batch.with_(rollout_log_probs=drawn))
        trainer.learn(batch, current=not trainer.runs_ahead)
        return {name: tensor.clone() for name, tensor in trainer.roles.actor.engine.model.state_dict().items()}


@pytest.mark.parametrize(
    "keys, reason",
    [
        (["algorithm.adv_estimator=remax"], "greedy one of the same weights"),
        (["algorithm.rollout_correction.preset=disabled"], "nothing corrects"),
        (["algorithm.rollout_correction.rollout_is=null", "actor_rollout_ref.actor.ppo_epochs=2"], "nothing corrects"),
        (["actor_rollout_ref.rollout.deterministic=True"], "cannot be of several steps"),
    ],
)
def test_what_has_no_meaning_ahead_is_refused_by_name(keys, reason):
    with pytest.raises(UserError, match=reason):
        load(["algorithm.adv_estimator=grpo", "algorithm.staleness=1", *keys])


def test_several_updates_a_step_are_weighed_and_the_origin_says_why():
    several = load(["algorithm.adv_estimator=grpo", "algorithm.staleness=2", "actor_rollout_ref.actor.ppo_epochs=2"])
    assert several.config.algorithm.rollout_correction.rollout_is == "token"
    assert several.origins["algorithm.rollout_correction.rollout_is"] == "algorithm.staleness=2"
    one = load(["algorithm.adv_estimator=grpo", "algorithm.staleness=2"])
    assert one.config.algorithm.rollout_correction.rollout_is is None
