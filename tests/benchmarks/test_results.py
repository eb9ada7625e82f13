"""Runs of real models: their files load, documents say what a run left behind, and the pages say what documents say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from tiny_models import save_tiny

from benchmarks.results import experiment, pictures, records, tables
from paddock.commands.keys_of import EVAL
from paddock.data.prepare import humaneval
from paddock.data.prepare.gsm8k import SOURCE
from paddock.loading.load import load
from paddock.runs.samples import Sample, dump_samples

PAGES = [ROOT / "docs" / language / "results.md" for language in ("en", "zh")]
RUNS = pictures.read()
ALL = [run for runs in RUNS.values() for run in runs]
ON_GSM8K = [run for run in ALL if "strict" in run["held_out"]]
FINISHED = [run for run in ON_GSM8K if run["finished"]]
AS_SHIPPED = [run for run in FINISHED if "warm_up" not in run]
"""Runs from the model as it ships. Those after supervised training know the format."""
GRPO, SMALL = RUNS["grpo-0.5b"], RUNS["grpo-135m"]
ADAPTERS = [RUNS[f"grpo-lora{name}-0.5b"] for name in ("", "-merged")]
"""Runs with adapters beside the weights, and with merged ones."""
WITHOUT_TOOL, WITH_TOOL, TEXT_CALLS = (RUNS[f"grpo-sft{name}-0.5b"] for name in ("", "-calculator", "-calculator-text"))
"""Runs after supervised training: without a tool, with the calculator, and with calls to it in plain text."""


@pytest.mark.parametrize("name", experiment.names())
def test_an_experiment_trains_and_evaluates_by_keys_that_exist(name):
    found = experiment.load(name)
    own = [f"actor_rollout_ref.model.path={found.model}", f"trainer.total_training_steps={found.steps}"]
    trained = load([*found.training(), *own])
    assert trained.config.data.max_response_length == found.settings["data.max_response_length"]
    evaluated = EVAL.load([f"model={found.model}", "data=test.parquet", *found.sampling()])
    assert [warning for warning in evaluated.warnings if "no effect" in warning] == []
    assert evaluated.config.actor_rollout_ref.rollout.val_kwargs.n == 8


def test_an_experiment_adds_to_the_one_that_it_is_like():
    base, kin = experiment.load("rloo-0.5b"), experiment.load("rloo-no-kl-0.5b")
    changed = {key for key in base.settings if base.settings[key] != kin.settings.get(key)}
    assert changed == {"actor_rollout_ref.ref.fsdp_config.param_offload"}, "null leaves a key out"
    assert set(kin.settings) - set(base.settings) == {"algorithm.use_kl_in_reward"}
    assert (kin.model, kin.steps, kin.seeds) == (base.model, base.steps, (1,))


def test_curves_leave_out_a_line_that_is_half_written(tmp_path):
    lines = [
        {"step": 0, "val-core/x": 0.0},
        {"step": 1, "critic/score/mean": 0.25, "timing_s/step": 3.0},
        {"step": 2, "critic/score/mean": 0.5, "timing_s/step": 4.0, "timing_s/testing": 1.5},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "cri')
    expected = {"step": [1, 2], "seconds": [3.0, 7.0], "reward": [0.25, 0.5], "step_seconds": [3.0, 4.0]}
    assert records.curves(file) == expected
    assert records.curves(tmp_path / "nowhere") == {"step": [], "seconds": []}


def test_curves_keep_how_often_a_run_sampled_until_its_batch_was_full(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "timing_s/step": 1.0, "training/num_gen_batches": 4.0 - step} for step in (1, 2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert records.curves(file)["rounds"] == [3.0, 2.0]


def answered(*answers: str, group: int) -> list[Sample]:
    return [Sample("?", answer, 0.0, len(answer), group, data_source=SOURCE, ground_truth="72") for answer in answers]


def test_answers_are_counted_strictly_and_leniently():
    samples = [*answered("#### 72", r"\boxed{72}", group=0), *answered("#### 7", "72 or 71", group=1)]
    assert records.accuracies(samples) == {
        "strict": {"mean@2": 0.25, "pass@2": 0.5},
        "lenient": {"mean@2": 0.5, "pass@2": 0.5},
    }


def programs(*scores: float, group: int) -> list[Sample]:
    return [Sample("?", "def f(): ...", score, 12, group, data_source=humaneval.SOURCE) for score in scores]


def test_programs_are_counted_as_the_sandbox_scored_them():
    samples = [*programs(1.0, 0.0, group=0), *programs(0.0, 0.0, group=1)]
    assert records.accuracies(samples) == {"passed": {"mean@2": 0.25, "pass@2": 0.5}}


def test_a_run_on_programs_has_one_accuracy_in_its_document_rows_and_picture(tmp_path):
    held_out = records.HeldOut(tmp_path)
    for step, scores in ((0, (1.0, 0.0)), (20, (1.0, 1.0))):
        rows = [sample for group, score in enumerate(scores) for sample in programs(score, group=group)]
        dump_samples(tmp_path, step, rows, "trainer.validation_data_dir")
    assert held_out.read() == {"step": [0, 20], "passed": [0.5, 1.0], "length": [12.0, 12.0]}
    run = {
        **{"title": "P", "seed": 1, "steps": 20, "held_out": held_out.read(), "curves": {"reward": [0.25] * 20}},
        "sampled": {"after": {"passed": {"mean@8": 0.5, "pass@8": 0.75}}},
    }
    assert tables.greedy([run]) == ["P", "1", "50.0", "100.0"]
    assert tables.sampled([run]) == ["P", "50.0", "75.0"]
    assert tables.start({"accuracy": run["sampled"]["after"]}) == ["50.0", "75.0"]
    (picture,) = (picture for picture in pictures.PICTURES if "grpo-code-1.5b" in picture.colours)
    drawn = pictures.draw(picture, {"grpo-code-1.5b": [run]})
    assert "Qwen2.5-Coder-1.5B-Instruct, one H200, 512 answers a step" in drawn
    assert "HumanEval" in drawn and "lenient" not in drawn


def test_each_validation_of_a_run_is_an_entry(tmp_path):
    held_out = records.HeldOut(tmp_path)
    assert held_out.read() == {"step": []}
    for step, answers in ((0, ("72", "8")), (20, ("#### 72", "#### 72"))):
        rows = [sample for group, answer in enumerate(answers) for sample in answered(answer, group=group)]
        dump_samples(tmp_path, step, rows, "trainer.validation_data_dir")
    expected = {"step": [0, 20], "strict": [0.0, 1.0], "lenient": [0.5, 1.0], "length": [1.5, 7.0]}
    assert held_out.read() == expected


def test_a_document_is_read_back_as_it_was_written(tmp_path):
    document = {"seed": 1, "curves": {"step": [1, 2], "reward": [0.5, 0.25]}, "weights": {"tied": True}, "commit": None}
    records.write(document, tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == document
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_cell_has_mean_and_range_of_the_seeds_and_a_dash_for_what_was_not_reached():
    assert tables.cell([1.0, 2.0, 6.0]) == "3.0 (1.0-6.0)"
    assert tables.cell([1.04, 1.0]) == "1.0"
    assert tables.cell([None]) == "-"


def test_a_row_ends_with_the_lenient_accuracy_of_the_runs_own_last_step():
    run = {
        "title": "A",
        "seed": 1,
        "steps": 60,
        "held_out": {"step": [0, 60], "strict": [0.1, 0.3], "lenient": [0.2, 0.4]},
    }
    assert tables.greedy([run]) == ["A", "1", "10.0", "-", "-", "30.0", "-", "20.0", "40.0"]
    assert tables.greedy([{**run, "steps": 80}])[-1] == "-"


def ended(title: str, seed: int, strict: float, mean: float, best: float) -> dict[str, Any]:
    after = {"strict": {"mean@8": mean, "pass@8": best}}
    held_out = {"step": [0, 80], "strict": [0.0, strict]}
    return {"title": title, "seed": seed, "model": "m", "steps": 80, "held_out": held_out, "sampled": {"after": after}}


def test_runs_beside_grpo_have_the_error_that_other_seeds_would_make():
    runs = {
        "grpo-0.5b": [ended("G", seed, share, 0.4, 0.5) for seed, share in ((1, 0.30), (2, 0.32), (3, 0.34))],
        "a": [ended("A", 1, 0.40, 0.4, 0.6)],
        "b": [ended("B", seed, share, 0.4, 0.5) for seed, share in ((1, 0.33), (2, 0.33))],
        "shorter": [{**ended("C", 1, 0.9, 0.9, 0.9), "steps": 40}],
        "warm": [{**ended("D", 1, 0.9, 0.9, 0.9), "warm_up": "paddock sft"}],
    }
    # squares of G's differences from its mean: 4 + 0 + 4, of B's: 0, with 2 + 1 free: the spread is sqrt(8 / 3) = 1.63,
    # and the errors 1.63 sqrt(1 + 1 / 3) = 1.89 and 1.63 sqrt(1 / 2 + 1 / 3) = 1.49
    assert tables.beside(runs) == [
        ["A", "1", "**+8.0 ± 1.9**", "+0.0 ± 0.0", "**+10.0 ± 0.0**"],
        ["B", "1, 2", "+1.0 ± 1.5", "+0.0 ± 0.0", "+0.0 ± 0.0"],
    ]


def test_no_run_is_set_beside_grpo_without_a_spread_of_seeds():
    assert tables.beside({"a": [ended("A", 1, 0.4, 0.4, 0.4)]}) == []
    assert tables.beside({"grpo-0.5b": [ended("G", 1, 0.3, 0.3, 0.3)], "a": [ended("A", 1, 0.4, 0.4, 0.4)]}) == []


@pytest.mark.parametrize("steps", [40, 150])
def test_a_row_of_a_shorter_or_a_longer_run_has_the_steps_at_which_any_seed_was_validated(steps):
    runs = [
        {"title": "A", "seed": 1, "steps": steps, "held_out": {"step": [0, steps], "passed": [0.1, 0.3]}},
        {"title": "A", "seed": 2, "steps": steps, "held_out": {"step": [0, 30], "passed": [0.1, 0.2]}},
    ]
    assert tables.greedy(runs) == ["A", "1, 2", "10.0", "20.0", "30.0"]


@pytest.mark.parametrize("run", AS_SHIPPED, ids=lambda run: f"{run['experiment']}-{run['seed']}")
def test_a_committed_run_learnt_more_than_the_format(run):
    """By far more than chance: five standard errors of the difference of two accuracies over 1,319 problems."""
    noise = 5 * sqrt(2 * 0.25 / 1319)
    greedy, sampled = run["held_out"], run["sampled"]
    for name in records.METHODS:
        assert greedy[name][-1] - greedy[name][0] > noise
        assert sampled["after"][name]["pass@8"] - sampled["before"][name]["pass@8"] > noise


@pytest.mark.parametrize(
    "run", [run for run in ALL if run["finished"]], ids=lambda run: f"{run['experiment']}-{run['seed']}"
)
def test_a_finished_run_has_every_step_and_was_validated_after_the_last(run):
    assert len(run["curves"]["reward"]) == run["steps"] == run["held_out"]["step"][-1]


@pytest.mark.parametrize(
    "runs",
    (
        GRPO,
        RUNS["dapo-0.5b"],
        RUNS["grpo-1.5b"],
        *ADAPTERS,
        SMALL,
        RUNS["grpo-code-1.5b"],
        WITHOUT_TOOL,
        WITH_TOOL,
        TEXT_CALLS,
    ),
    ids=lambda runs: runs[0]["experiment"],
)
def test_the_committed_runs_are_their_experiment_with_every_seed(runs):
    found = experiment.load(runs[0]["experiment"])
    assert tuple(run["seed"] for run in runs) == found.seeds
    for run in runs:
        assert set(found.training()) <= set(run["command"].split())
        assert run.get("warm_up", "") == found.warm_up


@pytest.mark.parametrize("picture", pictures.PICTURES, ids=lambda picture: picture.file)
def test_the_committed_picture_shows_the_committed_runs(picture):
    file = ROOT / "docs/images" / picture.file
    assert (file.read_text() if file.is_file() else None) == pictures.draw(picture, RUNS)


def test_a_picture_of_experiments_that_have_not_run_is_not_drawn():
    assert pictures.draw(pictures.PICTURES[-1], {"ppo-0.5b": RUNS["ppo-0.5b"]}) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_tables_of_the_page_are_those_of_the_runs(page):
    text = page.read_text()
    for name, rows in tables.tables().items():
        for row in rows:
            assert (row.removeprefix("|") if name == "start" else row) in text, name


def run_two_steps(name: str, folder: Path, *more: str) -> dict[str, Any]:
    """The document of two steps with a tiny model, of rows in folder/data."""
    keys = ["trainer.device=cpu", "data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=2", "data.max_response_length=8", *more]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.results", name, "--seed", "1", "--steps", "2", "--data", folder / "data",
         "--out", folder / "out", "--model", save_tiny(folder / "model"), "--set", *keys],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads((folder / "out" / f"{name}-1.json").read_text())
    assert run["finished"] and run["curves"]["step"] == [1, 2] and run["held_out"]["step"] == [0, 2]
    return run


@pytest.mark.slow
def test_the_runner_trains_evaluates_and_writes_one_document(tmp_path):
    from paddock.data.prepare.command import main as prepare

    raw = tmp_path / "raw"
    raw.mkdir()
    problem = json.dumps({"question": "What is 70 + 2?", "answer": "It is 72.\n#### 72"}) + "\n"
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text(4 * problem)
    prepare("gsm8k", ["--local_save_dir", str(tmp_path / "data"), "--local_dataset_path", str(raw)])
    run = run_two_steps("grpo-0.5b", tmp_path)
    assert run["sampled"]["after"].keys() == run["sampled"]["before"].keys() == records.METHODS.keys()
    assert json.loads((tmp_path / "out/start-qwen2.5-coder-0.5b-instruct-gsm8k.json").read_text())["prompts"] == 4


@pytest.mark.slow
def test_the_runner_trains_on_our_programs_and_validates_on_humaneval(tmp_path):
    from benchmarks.results.programs.__main__ import FAMILIES, tasks_of
    from paddock.data.prepare.write import write_splits

    tasks = [next(tasks_of(name, FAMILIES[name], seed=1)) for name in ("chunks", "tank", "trees", "bits")]
    rows = {split: [task.row(split, index) for index, task in enumerate(tasks)] for split in ("train", "test")}
    rows["test"] = [{**row, "data_source": humaneval.SOURCE} for row in rows["test"]]
    write_splits(tmp_path / "data", rows, humaneval.COLUMNS)
    (tmp_path / "data" / "programs.json").write_text('{"train": 4}')
    run = run_two_steps("grpo-code-0.5b", tmp_path, "data.max_prompt_length=2048")
    assert run["programs"] == {"train": 4} and len(run["held_out"]["passed"]) == 2
    assert run["sampled"]["after"].keys() == run["sampled"]["before"].keys() == {records.PASSED}
    assert {"reward_seconds", "late"} <= run["curves"].keys()
    assert json.loads((tmp_path / "out/start-qwen2.5-coder-0.5b-instruct-programs.json").read_text())["prompts"] == 4
