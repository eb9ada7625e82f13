"""What is read from run folders, and what becomes of it: curves, bands and a summary, against hand-worked values."""

from __future__ import annotations

import json
import math

import pytest
from synthetic import VALIDATION, write_run

from paddock.errors import UserError
from paddock.report.curves import Curve, Series, common_label, curves_of, series_of, thinned
from paddock.report.summary import amount, duration, held_out, phase_seconds, summary_lines, total_seconds, training
from paddock.runs.reading import RecordedRun, read_run


def run_of(tmp_path, *rows: dict, name: str = "run") -> RecordedRun:
    return RecordedRun(tmp_path / name, list(rows), [], [])


# folders


def test_a_folder_with_metrics_alone_is_a_run(tmp_path):
    lines = write_run(tmp_path / "old", steps=3, samples=False, settings=None)
    run = read_run(tmp_path / "old")
    assert run.rows == lines and run.name == "old"
    assert (run.samples, run.starts, run.settings, run.environment) == ([], [], {}, {})
    assert read_run(tmp_path / "old" / "metrics.jsonl").rows == lines


def test_settings_of_an_older_run_come_from_its_newest_whole_checkpoint(tmp_path):
    write_run(tmp_path / "run", steps=3, settings=None)
    for step, text in ((2, '{"config": {"trainer.seed": 2}}'), (10, '{"config": {"trainer.seed": 10}}'), (20, "torn")):
        (tmp_path / "run" / f"global_step_{step}").mkdir()
        (tmp_path / "run" / f"global_step_{step}" / "trainer_state.json").write_text(text)
    assert read_run(tmp_path / "run").settings == {"trainer.seed": 10}


def test_torn_and_foreign_lines_are_left_out(tmp_path):
    lines = write_run(tmp_path / "run", steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / "run" / name).open("ab") as file:
            file.write(b'[1]\n{"step": "x"}\n\xff\xfe\n{"step": 4, "a": "text"}\n{"step": 4, "a"')
    run = read_run(tmp_path / "run")
    assert run.rows == lines and [line["step"] for line in run.samples] == [0, 0, 3, 3, 10, 10]


@pytest.mark.parametrize(
    ("make", "reason", "fix"),
    [
        (lambda root: None, "no such folder", "metrics.jsonl"),
        (lambda root: (root / "run").mkdir(), "holds no metrics.jsonl", "trainer.default_local_dir"),
        (lambda root: write_run(root / "run" / "inner"), "holds no metrics.jsonl", "run/inner"),
        (lambda root: [(root / "run").mkdir(), (root / "run/metrics.jsonl").touch()], "no step was logged", "wait"),
    ],
)
def test_what_is_no_run_folder_is_refused_with_a_way_out(tmp_path, make, reason, fix):
    make(tmp_path)
    with pytest.raises(UserError, match=reason) as error:
        read_run(tmp_path / "run")
    assert error.value.key == "paddock report" and fix in (error.value.fix or "")


# curves


def test_runs_that_differ_only_by_seed_become_one_curve_and_others_stay_alone(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path / f"grpo-seed{seed}", seed=seed)
    write_run(tmp_path / "fast", seed=1, settings=("actor_rollout_ref.actor.optim.lr=1e-3",))
    write_run(tmp_path / "twin", seed=1, settings=("actor_rollout_ref.actor.optim.lr=1e-3",))
    write_run(tmp_path / "old", settings=None)
    runs = [read_run(tmp_path / name) for name in ("grpo-seed1", "fast", "grpo-seed2", "twin", "grpo-seed3", "old")]
    curves = [(curve.label, [run.name for run in curve.runs]) for curve in curves_of(runs)]
    assert curves == [
        ("grpo (3 seeds)", ["grpo-seed1", "grpo-seed2", "grpo-seed3"]),
        ("fast", ["fast"]),  # equal settings and equal seeds: two curves, to be compared
        ("twin", ["twin"]),
        ("old", ["old"]),
    ]


def test_equal_folder_names_are_told_apart_by_their_parents(tmp_path):
    write_run(tmp_path / "a" / "run", settings=None)
    write_run(tmp_path / "b" / "run", settings=None)
    runs = [read_run(tmp_path / letter / "run") for letter in "ab"]
    assert [curve.label for curve in curves_of(runs)] == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("names", "label"),
    [(["run-seed1", "run-seed2"], "run"), (["run_s1", "run_s12"], "run"), (["x", "y"], "x and 1 more"),
     (["a/run1", "a/run2"], "run"), (["1/run", "2/run"], "1/run and 1 more")],
)  # fmt: skip
def test_a_curve_of_several_seeds_has_the_name_that_its_runs_share(names, label):
    assert common_label(names) == label


def test_the_band_of_seeds_is_one_standard_deviation_around_the_mean_at_steps_that_all_have(tmp_path):
    runs = [
        run_of(tmp_path, {"step": 1, "m": 1.0}, {"step": 2, "m": 2.0}, {"step": 3, "m": 9.0}),
        run_of(tmp_path, {"step": 1, "m": 3.0}, {"step": 2, "m": 2.0}, {"step": 3, "m": None}),
        run_of(tmp_path, {"step": 1, "m": 8.0}, {"step": 2, "m": 2.0}),
    ]
    series = series_of(Curve("curve", runs), "m")
    spread = math.sqrt((9 + 1 + 16) / 2)  # of 1, 3, 8 around 4
    assert series.steps == [1, 2] and series.values == [4.0, 2.0]
    assert series.low == pytest.approx([4 - spread, 2.0]) and series.high == pytest.approx([4 + spread, 2.0])
    assert series_of(Curve("curve", runs), "other") is None


def test_a_long_series_keeps_its_ends_and_its_spikes():
    values = [math.sin(i / 500) for i in range(10_000)]
    values[1234], values[7777] = 50.0, -50.0
    series = thinned(Series(list(range(10_000)), values), 1000)
    assert len(series.steps) <= 1000 and series.steps == sorted(set(series.steps))
    assert (series.steps[0], series.steps[-1]) == (0, 9999)
    assert {1234, 7777} <= set(series.steps)
    assert all(values[step] == value for step, value in zip(series.steps, series.values, strict=True))
    short = Series([1, 2, 3], [1.0, None, 2.0])
    assert thinned(short, 1000) is short
    gaps = thinned(Series(list(range(5000)), [None] * 5000), 100)
    assert gaps.steps == [0, 4999]


# summary


def test_seconds_of_a_step_are_split_into_phases_and_the_rest_is_other():
    row = {"timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/save_checkpoint": 4.0, "timing_s/step": 3.5}
    assert phase_seconds(row) == {"generation": 2.0, "policy update": 1.0, "checkpoint": 4.0, "other": 0.5}
    assert total_seconds([row, row, {"step": 0}]) == {
        "generation": 4.0, "policy update": 2.0, "checkpoint": 8.0, "other": 1.0
    }  # fmt: skip


def test_every_timer_of_the_trainers_is_a_phase():
    """A new timer that is missing here would be counted as `other`, or twice."""
    import re

    from conftest import ROOT

    from paddock.report.summary import PHASES

    found = set()
    for path in (
        path for package in ("trainer", "rollouts", "workers") for path in (ROOT / "paddock" / package).glob("*.py")
    ):
        found |= set(re.findall(r'(?:time|timer)\("(\w+)"\)', path.read_text()))
    assert found - {"step"} == set(PHASES)


def test_held_out_results_are_the_first_and_the_last_validation(tmp_path):
    write_run(tmp_path / "run", steps=40)
    (change,) = held_out(read_run(tmp_path / "run"))
    assert (change.before, change.after, change.percent) == (0.25, 0.75, True)
    assert change.text() == "25.0% -> 75.0%" and change.note == "best 75.0% at step 40"


def test_a_reward_that_is_no_share_has_no_percent_and_sources_are_named(tmp_path):
    row = {"step": 0, "val-core/a/b/reward/mean@4": 1.5, VALIDATION: 0.5}
    changes = held_out(run_of(tmp_path, row))
    assert [(c.label, c.text()) for c in changes] == [
        ("Held-out reward, a/b", "1.5"), ("Held-out reward, openai/gsm8k", "0.5")
    ]  # fmt: skip


def test_rewards_are_means_of_the_first_and_last_tenth(tmp_path):
    rows = [{"step": i, "critic/score/mean": float(i)} for i in range(1, 31)]
    (reward,) = training(run_of(tmp_path, *rows))
    assert (reward.before, reward.after) == (2.0, 29.0) and reward.note == "mean of the first and last 3 steps"


def test_the_summary_of_a_console_has_a_line_for_each_number(tmp_path):
    write_run(tmp_path / "run", steps=40)
    said = summary_lines(read_run(tmp_path / "run"))
    assert said[0] == "Held-out accuracy  25.0% -> 75.0%  (best 75.0% at step 40)"
    assert said[1].startswith("Reward             0.0")
    assert said[2] == "Time of steps      2 min 10 s  (generation 62%, policy update 31%, other 8%)"


def test_sft_and_reward_models_are_summarised_by_loss_and_accuracy(tmp_path):
    rows = [{"step": i, "train/loss": 4.0 / i, "val/loss": 3.0 / i, "val/accuracy": i / 4} for i in (1, 2, 3)]
    said = summary_lines(run_of(tmp_path, *rows))
    assert [" ".join(line.split()) for line in said] == [
        "Held-out accuracy 25.0% -> 75.0% (best 75.0% at step 3)",
        "Held-out loss 3 -> 1 (best 1 at step 3)",
        "Training loss 4 -> 1.33 (first and last step)",
    ]


def test_numbers_and_durations_read_well():
    assert [amount(x) for x in (0.12345, 1234.5, 1e-7, 2e9)] == ["0.123", "1,234", "1e-07", "2e+09"]
    assert [duration(s) for s in (8.34, 59.99, 151, 11_520)] == ["8.3 s", "60.0 s", "2 min 31 s", "3 h 12 min"]
    assert json.loads(json.dumps(amount(0.5, percent=True))) == "50.0%"
