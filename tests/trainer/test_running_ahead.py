"""Whole runs whose rollouts run ahead: what they train, what corrects it, and that they go on where they stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file

from paddock.config.roles import RATIO_LOSSES
from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.plan.ahead import Simulation
from paddock.trainer.lifecycle import Listeners
from paddock.trainer.loop import Trainer
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Callable[[int], Path]:
    """Gives the folder of a whole GRPO run of a staleness, which is made once and only read or copied."""
    folders = dict[int, Path]()

    def of(staleness: int) -> Path:
        if staleness not in folders:
            folder = folders[staleness] = tmp_path_factory.mktemp(f"staleness_{staleness}")
            run(folder, f"algorithm.staleness={staleness}", f"trainer.rollout_data_dir={folder}/rollouts")
        return folders[staleness]

    return of


def stopped_at(step: int, whole: Path, folder: Path) -> Path:
    """Copies a whole run as it was after a step."""
    shutil.copytree(whole, folder)
    back_to(folder, step, STEPS)
    return folder


EVERY_STEP = range(1, STEPS)


@pytest.mark.parametrize(
    ("keys", "stops"),
    [([], (1, 2, 4)), (PPO, (3,)), pytest.param([], EVERY_STEP, marks=pytest.mark.slow),
     pytest.param(PPO, EVERY_STEP, marks=pytest.mark.slow)],
    ids=["grpo", "ppo", "grpo, every step", "ppo, every step"],
)  # fmt: skip
def test_a_run_that_goes_on_at_any_step_equals_the_one_that_was_not_stopped(keys, stops, finished, tmp_path):
    whole = tmp_path / "whole" if keys else finished(2)
    rows = run(whole, "algorithm.staleness=2", *keys) if keys else metrics_of(whole)
    assert max(row[f"{OFF}trajectory_staleness_worst/max"] for row in rows) == 2
    assert any(row["rollout/window/carried_tokens"] for row in rows)
    for stopped in stops:
        folder = stopped_at(stopped, whole, tmp_path / f"stopped_{stopped}")
        assert run(folder, "algorithm.staleness=2", *keys) == rows
        for name, tensor in weights(whole, STEPS).items():
            assert torch.equal(tensor, weights(folder, STEPS)[name]), (stopped, name)


def test_each_step_trains_the_prompts_of_the_run_in_which_nothing_runs_ahead(finished):
    dumps = {}
    for staleness in (0, 1, 4):
        files = sorted((finished(staleness) / "rollouts").glob("*.jsonl"), key=lambda path: int(path.stem))
        dumps[staleness] = [[json.loads(line)["prompt"] for line in file.read_text().splitlines()] for file in files]
    assert len(dumps[0]) == STEPS and dumps[0] == dumps[1] == dumps[4]


def test_the_age_of_tokens_is_counted_in_updates_and_bounded(finished):
    rows = metrics_of(finished(1))
    for before, row in pairwise(rows):
        carried, again = before["rollout/window/carried_tokens"], row.get("rollout/recomputed_tokens", 0)
        assert (again > carried) if carried else again == 0  # with the prompts
    for row in rows:
        assert sum(row[f"{OFF}token_staleness_share/{age}"] for age in range(2)) == pytest.approx(1)
        assert 0 <= row[f"{OFF}trajectory_staleness/min"] <= row[f"{OFF}trajectory_staleness_worst/max"] <= 1
        assert row[f"{OFF}trajectory_spans/max"] <= 2
    assert rows[0][f"{OFF}trajectory_staleness_worst/max"] == 0 and rows[0][f"{OFF}ess"] == pytest.approx(1)
    assert any(row["rollout_corr/kl"] != 0 and row[f"{OFF}ess"] < 1 for row in rows[1:])


class DecodeSteps:
    """Paces a simulation by its decode steps alone."""

    def prefill(self, tokens: int) -> float:
        return 0.0

    def decode(self, steps: float, tokens: float, keys: float) -> float:
        return steps


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_run_takes_the_decode_steps_that_a_plan_simulates(staleness, tmp_path):
    """A session draws a first token by its prefill, so that it takes a step less."""
    keys = [f"trainer.rollout_data_dir={tmp_path}/rollouts", "actor_rollout_ref.rollout.temperature=2.0",
            "data.max_response_length=128", f"algorithm.staleness={staleness}", "trainer.save_freq=-1"]  # fmt: skip
    rows = run(tmp_path, *keys, steps=10)
    dumps = [(tmp_path / "rollouts" / f"{step}.jsonl").read_text().splitlines() for step in range(1, 11)]
    lengths = [[json.loads(line)["length"] for line in dump] for dump in dumps]
    simulated = Simulation(DecodeSteps(), prompt=0).sessions(lengths, slots=48, ahead=staleness)  # type: ignore[arg-type]
    steps = [row["rollout/decode_steps"] for row in rows][: len(simulated)]
    if staleness == 0:
        assert steps == [count - 1 for count in simulated]
    assert sum(steps) == pytest.approx(sum(simulated), rel=0.1)
    assert max(map(max, lengths)) > 4 * median(chain(*lengths))


def test_a_smaller_staleness_drains_the_window_of_the_checkpoint(tmp_path):
    run(tmp_path, "algorithm.staleness=4", steps=10)
    back_to(tmp_path, 3, 10)
    rows = run(tmp_path, "algorithm.staleness=1", steps=10)
    ages = [row[f"{OFF}trajectory_staleness_worst/max"] for row in rows]
    assert max(ages[3:7]) > 1 and max(ages[8:]) <= 1


def test_what_parts_of_responses_were_drawn_under_stays_while_they_wait(finished, tmp_path):
    ahead = stopped_at(3, finished(2), tmp_path / "ahead")
    with pytest.raises(UserError, match="responses that are drawn in part under it") as error:
        run(ahead, "algorithm.staleness=2", "actor_rollout_ref.rollout.temperature=0.5")
    assert error.value.key == "actor_rollout_ref.rollout.temperature"
    other = stopped_at(3, finished(0), tmp_path / "other")
    assert len(run(other, "actor_rollout_ref.rollout.temperature=0.5")) == STEPS


@pytest.mark.parametrize(
    ("anchor", "loss"),
    [("behaviour", loss) for loss in sorted(RATIO_LOSSES)]
    + [("decoupled", loss) for loss in sorted({*RATIO_LOSSES, "gpg", "reinforce"})],
)
def test_what_drew_a_token_moves_the_gradient_of_every_loss(anchor, loss, monkeypatch, tmp_path):
    keys = [*SMALL, f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}", "algorithm.staleness=1",
            "actor_rollout_ref.actor.policy_loss.dro_beta=0.1", "trainer.total_training_steps=3",
            "algorithm.rollout_correction.rollout_is_threshold=1000.0"]  # fmt: skip
    if anchor == "decoupled":
        keys.append("algorithm.rollout_correction.rollout_is=token")
    found = []
    with drawn(tmp_path, keys) as (trainer, batch):
        updater = trainer.roles.actor.engine.updater
        monkeypatch.setattr(updater, "step", lambda: found.append([one.grad.clone() for one in updater.masters]))
        for shift in (0.0, 0.0, 0.3):
            update(trainer, batch, shift)
    same, plain, moved = (torch.cat([gradient.flatten() for gradient in one]) for one in found)
    assert plain.any() and torch.equal(same, plain) and not torch.equal(plain, moved)


def test_at_no_age_both_anchors_take_the_step_of_today(tmp_path):
    keys = [*SMALL, "trainer.total_training_steps=3"]
    today = after_one_update(tmp_path / "today", keys)
    for name, more in (("behaviour", ()), ("decoupled", ["algorithm.rollout_correction.rollout_is=token"])):
        found = after_one_update(tmp_path / name, [*keys, "algorithm.staleness=1", *more])
        for key, tensor in today.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5)  # a step of Adam is 1e-3


@contextmanager
def drawn(folder: Path, keys: list[str]) -> Iterator[tuple[Trainer, Batch]]:
    """Opens a run, and draws the batch of its first step."""
    config = load([*keys, f"trainer.default_local_dir={folder}"]).config
    with open_training(config, REINFORCEMENT, {}, Listeners()) as training:
        trainer = training.opened()
        trainer.step_no += 1
        yield trainer, trainer.collector.collect(1, trainer.timer, trainer.roles.generating)[0]


def update(trainer: Trainer, batch: Batch, shift: float) -> None:
    """Learns from a batch once; `shift` is taken from the log-probs of every other row's weights."""
    log_probs = batch.need("rollout_log_probs").clone()
    log_probs[::2] -= shift
    batch, _ = trainer.with_advantages(batch.with_(rollout_log_probs=log_probs))
    trainer.learn(batch, current=not trainer.runs_ahead)


def after_one_update(folder: Path, keys: list[str]) -> dict[str, torch.Tensor]:
    """Returns the weights after the first step."""
    with drawn(folder, keys) as (trainer, batch):
        update(trainer, batch, 0.0)
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
