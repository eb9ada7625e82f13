"""The whole loop on the embedded model: every algorithm trains, and a stopped run goes on as if it had not been."""

from __future__ import annotations

import gc
import json
import signal
import time
import weakref
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean, pstdev
from threading import Event

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from paddock.core import garbage
from paddock.core.garbage import NEW_OBJECTS
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rollouts.collect import Collector, over_rounds
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import REINFORCEMENT, open_trainer, train
from paddock.workers.sharded import WorkerLost
from tests.forked import Forked

SMALL = [
    "data.train_batch_size=8",
    "data.val_max_samples=16",
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.save_freq=1",
    "trainer.logger=[file]",
    "data.dataloader_num_workers=0",
]
ONE_STEP = "trainer.total_training_steps=1"


def arguments(folder: Path, *overrides: str) -> list[str]:
    return [*SMALL, f"trainer.default_local_dir={folder}", *overrides]


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    assert train(load(arguments(folder, *overrides)).config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, step: int, role: str = "actor") -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}" / role / "model.safetensors")


def changed(folder: Path) -> bool:
    before, after = load_file(ROOT / "paddock/assets/tiny/model.safetensors"), weights(folder, 2)
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=gae"],
        ["algorithm.adv_estimator=grpo"],
        ["algorithm.adv_estimator=rloo"],
        ["algorithm.adv_estimator=remax"],
        ["algorithm.adv_estimator=reinforce_plus_plus"],
        ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
        ["algorithm.adv_estimator=opo"],
        ["algorithm.adv_estimator=gpg"],
        ["algorithm.adv_estimator=optimal_token_baseline"],
        ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"],
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True"],
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"],
        [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.shuffle=True",
        ],
        ["algorithm.adv_estimator=grpo", "algorithm.rollout_correction.preset=decoupled_token_is"],
        ["algorithm.adv_estimator=grpo", "algorithm.rollout_correction.preset=bypass_pg_is"],
        ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True"],
        ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True"],
        ["algorithm.adv_estimator=rloo", "algorithm.kl_ctrl.type=adaptive"],
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf"],
        [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            "actor_rollout_ref.model.use_remove_padding=False",
        ],
    ],
    ids=lambda overrides: " ".join(word.rpartition(".")[2] for word in overrides),
)
def test_every_algorithm_trains(overrides, tmp_path):
    rows = run(tmp_path, *overrides, "trainer.save_freq=-1")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/skipped"] == 0 for row in rows)
    assert changed(tmp_path)


LOGGED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(len(solution_str) % 3 == 0)
    with open({log!r}, "a") as file:
        print(score, file=file)
    return {{"score": score, "length": len(solution_str)}}
"""


def test_metrics_of_rewards_are_of_all_answers_where_groups_are_filtered(tmp_path):
    (tmp_path / "reward.py").write_text(LOGGED.format(log=str(tmp_path / "scores")))
    (row,) = run(tmp_path, "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True", ONE_STEP,
                 "algorithm.filter_groups.metric=score", "data.gen_batch_size=2", "data.val_files=[]",
                 f"custom_reward_function.path={tmp_path}/reward.py")  # fmt: skip
    rounds = int(row["training/num_gen_batches"])
    scores = [float(line) for line in (tmp_path / "scores").read_text().split()][-rounds * 2 * 4 :]  # one was a trial
    assert rounds > 4 and len(scores) == rounds * 2 * 4
    assert row["reward/score/mean"] == pytest.approx(sum(scores) / len(scores))
    kept = row["critic/score/mean"]
    assert 0 < kept < 1 and kept != row["reward/score/mean"]


def test_rounds_become_one_by_the_statistic_that_a_metric_is_named_for():
    rounds = [{"reward/acc/mean": 0.25, "reward/model/max": 2.0, "reward/model/min": 1.0, "reward/timeouts": 3.0},
              {"reward/acc/mean": 0.75, "reward/model/max": 1.0, "reward/model/min": 0.5, "reward/timeouts": 1.0,
               "reward/judge/failed": 2.0}]  # fmt: skip
    assert over_rounds(rounds) == {
        "reward/acc/mean": 0.5, "reward/model/max": 2.0, "reward/model/min": 0.5, "reward/timeouts": 4.0,
        "reward/judge/failed": 2.0,
    }  # fmt: skip


def test_the_spread_over_rounds_is_that_of_all_their_answers():
    answers = [[0.0, 1.0, 1.0], [3.0, 5.0, 4.0], []]
    rounds = [{"reward/a/mean": fmean(one), "reward/a/std": pstdev(one)} if one else {"reward/a/std": 0.0}
              for one in answers]  # fmt: skip
    assert over_rounds(rounds)["reward/a/std"] == pytest.approx(pstdev(chain(*answers)))
    assert over_rounds(rounds[2:]) == {"reward/a/std": 0.0}


def test_roles_are_built_only_where_they_are_needed(tmp_path):
    grpo, rloo, ppo = (run(tmp_path / name, f"algorithm.adv_estimator={name}", ONE_STEP)[0]
                       for name in ("grpo", "rloo", "gae"))  # fmt: skip
    assert "timing_s/ref" not in grpo and "timing_s/values" not in grpo
    assert "timing_s/ref" in rloo and "timing_s/values" not in rloo
    assert "timing_s/values" in ppo and "timing_s/ref" not in ppo


def test_rollout_and_trainer_agree_on_log_probs(tmp_path):
    """Two mini-batches: the old log-probs are computed again, and compared with those of the rollout."""
    keys = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=4", ONE_STEP)
    (row,) = run(tmp_path, *keys)
    assert row["training/rollout_probs_diff_max"] < 1e-5


def test_the_batch_may_be_cut_anyhow(tmp_path):
    """Token budgets, row counts and the size of the rollout engine never change what is learnt."""
    common = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.optim.lr=1e-3", ONE_STEP]
    run(tmp_path / "a", *common)
    run(
        tmp_path / "b",
        *common,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "critic.ppo_max_token_len_per_gpu=48",
        "actor_rollout_ref.rollout.max_num_seqs=7",
    )
    one, other = weights(tmp_path / "a", 1), weights(tmp_path / "b", 1)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=0)


def test_critic_warmup_leaves_the_actor_alone(tmp_path):
    run(tmp_path, "algorithm.adv_estimator=gae", "trainer.critic_warmup=9")
    assert not changed(tmp_path)


def test_validation_reports_accuracy_by_source(tmp_path):
    rows = run(
        tmp_path,
        "algorithm.adv_estimator=grpo",
        "trainer.val_before_train=True",
        "trainer.test_freq=1",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    )
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["val-core/paddock/addition/reward/mean@4"] <= 1 for row in rows)
    assert rows[0]["val-aux/paddock/addition/reward/pass@4"] >= rows[0]["val-core/paddock/addition/reward/mean@4"]


@pytest.mark.parametrize("estimator", ["gae", pytest.param("rloo", marks=pytest.mark.slow)])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(estimator, tmp_path):
    common = [
        f"algorithm.adv_estimator={estimator}",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    ]
    whole = run(tmp_path / "whole", *common, "trainer.total_training_steps=4")
    folder = tmp_path / "halves"
    run(folder, *common, "trainer.total_training_steps=4", "trainer.save_freq=2")
    for step in (3, 4):  # as if the run had been killed after its second step
        path = folder / f"global_step_{step}"
        if path.exists():
            path.rename(tmp_path / f"gone_{step}")
    again = run(folder, *common, "trainer.total_training_steps=4")
    roles = ["actor", "critic"] if estimator == "gae" else ["actor"]
    for role in roles:
        one, other = weights(tmp_path / "whole", 4, role), weights(folder, 4, role)
        assert all(torch.equal(one[name], other[name]) for name in one)
    for before, after in zip(whole[2:], again[2:], strict=True):
        timed = ("timing", "perf")
        assert {k: v for k, v in before.items() if not k.startswith(timed)} == {
            k: v for k, v in after.items() if not k.startswith(timed)
        }


def start(folder: Path, *overrides: str) -> Forked:
    return Forked(["train", *arguments(folder, *overrides)])


def wait_for(path: Path, process: Forked) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.exists(), process.said()


@pytest.mark.slow  # tests/chaos/test_kills.py kills a run three times among the default tests
def test_kill_9_then_the_same_command_gives_the_same_weights(tmp_path):
    common = ["algorithm.adv_estimator=grpo", "trainer.total_training_steps=12"]
    run(tmp_path / "whole", *common)
    folder = tmp_path / "killed"
    process = start(folder, *common)
    wait_for(folder / "global_step_3", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "global_step_12").exists()
    run(folder, *common)
    one, other = weights(tmp_path / "whole", 12), weights(folder, 12)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(tmp_path):
    process = start(
        tmp_path, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2000", "trainer.save_freq=1000"
    )
    wait_for(tmp_path / "metrics.jsonl", process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130, process.said()
    output = process.said()
    assert "The same command goes on from there" in output
    steps = [int(path.name.rpartition("_")[2]) for path in tmp_path.glob("global_step_*")]
    assert len(steps) == 1 and steps[0] < 2000


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(tmp_path, "algorithm.adv_estimator=grpo")
    with pytest.raises(UserError, match="adv_estimator"):
        run(tmp_path, "algorithm.adv_estimator=rloo", "trainer.total_training_steps=3")


def test_updates_that_are_not_finite_are_skipped_and_end_the_run_with_their_rows(tmp_path, monkeypatch):
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1e38 * len(solution_str)\n"
    )
    before = load_file(ROOT / "paddock/assets/tiny/model.safetensors")
    with pytest.raises(UserError, match="not finite"):
        run(
            tmp_path,
            "algorithm.adv_estimator=grpo",
            f"custom_reward_function.path={scorer}",
            "trainer.max_nonfinite_steps=2",
            "trainer.total_training_steps=5",
            "algorithm.norm_adv_by_std_in_grpo=False",
        )
    after = weights(tmp_path, 1)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert list((tmp_path / "nonfinite").glob("*.jsonl"))


def test_rollouts_are_kept_as_jsonl(tmp_path):
    run(tmp_path, "algorithm.adv_estimator=grpo", f"trainer.rollout_data_dir={tmp_path / 'rollouts'}", ONE_STEP)
    lines = (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()
    assert len(lines) == 32
    assert {"prompt", "answer", "score", "advantage", "length"} <= json.loads(lines[0]).keys()


def test_a_step_logs_the_spread_of_rewards_and_the_gap_between_trainer_and_rollout(tmp_path):
    """One update per step: the trainer's probabilities are known only inside the update."""
    keys = ["algorithm.adv_estimator=grpo", ONE_STEP]
    (one,) = run(tmp_path / "one", *keys)
    small = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    (many,) = run(tmp_path / "many", *keys, small)
    (anew,) = run(tmp_path / "anew", *keys, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    names = ("probs_diff_valid", "probs_diff_max", "probs_diff_mean", "probs_diff_std", "actor_probs_pearson_corr")
    for line in (one, many, anew):
        gap = {name: line[f"training/rollout_{name}"] for name in names}
        assert gap["probs_diff_valid"] == 1.0 and gap["actor_probs_pearson_corr"] > 0.999999
        assert 0 < gap["probs_diff_mean"] < gap["probs_diff_max"] < 1e-5 and 0 < gap["probs_diff_std"] < 1e-5
        assert 0 < line["reward/std"] <= 1
        assert not any(name.startswith("moment") or "/moment/" in name for name in line)


class Cycle:
    """Refers to itself: only garbage collection frees it."""


def test_no_step_waits_for_a_garbage_collection_of_all_that_was_loaded(tmp_path, monkeypatch):
    seen, score, thresholds, cycles = [], Collector.score_drawn, gc.get_threshold(), []

    def watched(*arguments):
        seen.append((gc.get_threshold()[0], gc.get_freeze_count() > 100_000))
        cycle = Cycle()
        cycle.itself = cycle
        cycles.append(weakref.ref(cycle))
        return score(*arguments)

    monkeypatch.setattr(Collector, "score_drawn", watched)
    monkeypatch.setattr(garbage, "frozen", Event())  # a run before this one saw what the tests froze
    gc.unfreeze()  # what the tests took out of it for themselves
    try:
        run(tmp_path, "algorithm.adv_estimator=grpo")
        assert gc.get_freeze_count() == 0
        assert len(cycles) == 2 and not any(cycle() for cycle in cycles), "a step leaves no cycle behind"
    finally:
        gc.freeze()
    assert seen == [(NEW_OBJECTS, True)] * 2 and gc.get_threshold() == thresholds


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_a_schedule_counts_steps_of_the_run_and_ends_with_it_however_many_updates_a_step_has(estimator, tmp_path):
    """Four steps of two mini-batches and two epochs; beside a critic that warms up, the actor begins at step 3."""
    keys = [f"algorithm.adv_estimator={estimator}", "trainer.total_training_steps=4", "trainer.save_freq=-1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
            "critic.optim.lr=1e-3", "critic.optim.lr_warmup_steps=2"]  # fmt: skip
    rows = run(tmp_path, *keys, *(["trainer.critic_warmup=3"] if estimator == "gae" else []))
    expected = [1e-3, 0.5e-3] if estimator == "gae" else [1e-3, 0.75e-3, 0.5e-3, 0.25e-3]
    assert [row["actor/lr"] for row in rows if "actor/lr" in row] == pytest.approx(expected)
    if estimator == "gae":
        assert [row["critic/lr"] for row in rows] == pytest.approx([0, 0.5e-3, 1e-3, 1e-3])


def test_a_run_that_goes_on_has_the_settings_that_it_reports(tmp_path):
    common = ["algorithm.adv_estimator=rloo", "trainer.total_training_steps=2"]
    run(tmp_path, *common, "algorithm.kl_ctrl.kl_coef=0.001", ONE_STEP)
    optim = "actor_rollout_ref.actor.optim"
    rows = run(tmp_path, *common, "algorithm.kl_ctrl.kl_coef=0.5", f"{optim}.weight_decay=0.25",
               f"{optim}.betas=[0.5,0.6]")  # fmt: skip
    assert [row["actor/reward_kl_penalty_coeff"] for row in rows] == [0.001, 0.5]
    saved = torch.load(tmp_path / "global_step_2/actor/optimizer.pt", weights_only=True)["optimizer"]
    assert saved["param_groups"][0]["weight_decay"] == 0.25 and tuple(saved["param_groups"][0]["betas"]) == (0.5, 0.6)
    with pytest.raises(UserError, match=r"optim\.optimizer"):
        run(tmp_path, *common, f"{optim}.optimizer=SGD", "trainer.total_training_steps=3")


def test_val_only_validates_the_checkpoint_that_is_there(tmp_path):
    keys = ["algorithm.adv_estimator=grpo", ONE_STEP]
    run(tmp_path, *keys)
    rows = run(tmp_path, *keys, "trainer.val_only=True")
    assert [row["step"] for row in rows] == [1]
    assert "val-core/paddock/addition/reward/mean@1" in rows[0] and "actor/lr" in rows[0]


def test_a_worker_that_is_lost_while_the_run_opens_restarts_it(tmp_path):
    opened = []

    def open_late(*parts):
        opened.append(parts)
        if len(opened) == 1:
            raise WorkerLost("rank 0 of 1 (main) died in actor.load")
        return open_trainer(*parts)

    kind, keys = replace(REINFORCEMENT, open=open_late), arguments(tmp_path, ONE_STEP, "algorithm.adv_estimator=grpo")
    with pytest.raises(UserError, match="rank 0 of 1"):
        kind.train(load([*keys, "trainer.max_restarts=0"]).config)
    opened.clear()
    assert kind.train(load([*keys, "trainer.max_restarts=1"]).config).finished and len(opened) == 2


def test_a_restarted_run_counts_all_steps_that_it_trained(tmp_path, monkeypatch):
    step, lost = Trainer.step, []

    def dying(self):
        if self.step_no == 2 and not lost:
            lost.append(self.step_no)
            raise WorkerLost("rank 0 of 1 (main) died in actor.learn")
        return step(self)

    monkeypatch.setattr(Trainer, "step", dying)
    outcome = train(load(arguments(tmp_path, "algorithm.adv_estimator=grpo", "trainer.max_restarts=1")).config)
    assert outcome.finished and outcome.trained == 2 and lost == [2]


def test_groups_are_filtered_by_their_final_reward(tmp_path):
    keys = ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True", ONE_STEP]
    (one,) = run(tmp_path / "a", *keys, "algorithm.filter_groups.metric=seq_final_reward")
    (other,) = run(tmp_path / "b", *keys)
    assert one["critic/score/mean"] == other["critic/score/mean"]


def test_optimal_token_baselines_have_what_they_need_in_bypass_mode(tmp_path):
    keys = ["algorithm.adv_estimator=optimal_token_baseline", ONE_STEP]
    (one,) = run(tmp_path / "a", *keys, "algorithm.rollout_correction.bypass_mode=True")
    (other,) = run(tmp_path / "b", *keys)
    assert one["critic/advantages/max"] == pytest.approx(other["critic/advantages/max"], abs=1e-4)
