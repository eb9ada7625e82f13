"""Runs of real models: their files load, documents say what a run left behind, and the pages say what documents say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from math import sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from conftest import ROOT
from tiny_models import save_tiny

from benchmarks.learning_curves import smooth
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


def test_runs_without_eight_samples_are_the_arms_with_and_without_a_calculator():
    assert [run for run in FINISHED if "sampled" not in run] == [*WITHOUT_TOOL, *WITH_TOOL, *TEXT_CALLS]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_page_names_command_date_versions_and_weights_of_the_runs(page):
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
    assert GRPO[0]["command"].replace("DATA/", "$HOME/data/gsm8k/") in text
    for run in ALL:
        versions = {name: run["versions"][name] for name in ("torch", "transformers", "python")}
        assert (run["weights"] is None) == ("warm_up" in run), "supervised training leaves no record of the file"
        start = run["warm_up"].replace(" data=", " data=$HOME/data/") if "warm_up" in run else run["weights"]["sha256"]
        for fact in (run["date"], run["device"], start, *versions.values()):
            assert fact in text, fact


def test_what_the_page_says_of_seeds_and_noise_is_so():
    text = " ".join(PAGES[0].read_text().split())
    ends = [100 * run["held_out"]["strict"][-1] for run in GRPO]
    assert f"within {max(ends) - min(ends):.1f} points of each other" in text
    assert f"by {100 * sqrt(0.39 * 0.61 / 1319):.1f} points (one standard error)" in text
    gaps = [100 * abs(run["held_out"]["lenient"][-1] - run["held_out"]["strict"][-1]) for run in FINISHED]
    assert f"differ by {max(gaps):.1f} points at most" in text
    assert [late(run) for run in GRPO] == ["-0.2", "-0.4", "+1.8"] and "by -0.2, -0.4 and +1.8 points" in text
    rloo, ppo = RUNS["rloo-0.5b"], RUNS["ppo-0.5b"]
    assert [late(run) for run in rloo] == ["+0.4", "+0.6", "-1.2"] and "RLOO's by +0.4, +0.6 and -1.2" in text
    assert [late(run) for run in ppo] == ["+2.7", "+3.2", "+2.7"] and "still gained 2.7, 3.2 and 2.7" in text
    others = [100 * run["held_out"]["strict"][-1] for run in rloo]
    assert f"of RLOO within {max(others) - min(others):.1f}, with means {mean(ends) - mean(others):.1f} apart" in text
    highest = [100 * run["held_out"]["strict"][-1] for run in ppo]
    assert f"worst seed of PPO ends {min(highest) - max(ends):.1f} points above the best of GRPO" in text
    assert f"its mean {mean(highest) - mean(ends):.1f} above GRPO's" in text
    cut = [round(100 * run["curves"]["cut"][0]) for run in GRPO]
    assert f"{min(cut)} to {max(cut)} % of the samples were cut" in text
    assert f"by {max(max(run['curves']['gap']) for run in GRPO):.4f} at most" in text
    adds = [median(run["curves"]["reference_seconds"]) for run in rloo]
    assert f"reference of RLOO adds {min(adds) // 0.1 / 10:.1f} to {max(adds):.1f} s" in text
    steps, updates, values = (
        [median(run["curves"][name][-20:]) for run in ppo]
        for name in ("step_seconds", "critic_seconds", "values_seconds")
    )
    assert "medians of its seeds are {:.2f}, {:.2f} and {:.2f} s".format(*steps) in text
    assert f"critic of PPO {min(updates):.2f} to {max(updates):.2f} s for its update" in text
    assert f"{min(values):.2f} to {max(values):.2f} s for its values" in text
    assert round(mean_step(ppo) / mean_step(GRPO), 1) == 1.7


def test_what_the_page_says_of_the_kin_of_grpo_is_so():
    text = " ".join(PAGES[0].read_text().split())
    (doctor,), (gspo,), (cispo,) = (RUNS[f"{name}-0.5b"] for name in ("dr-grpo", "gspo", "cispo"))
    strict = {
        run["title"]: [f"{100 * share:.1f}" for share in run["held_out"]["strict"]] for run in (doctor, gspo, cispo)
    }
    best = [f"{100 * max(run['held_out']['strict'][place] for run in GRPO):.1f}" for place in (1, -1)]
    (plus,), (without_kl,) = (RUNS[f"{name}-0.5b"] for name in ("reinforce-plus-plus", "rloo-no-kl"))
    last = [f"{100 * run['held_out']['strict'][-1]:.1f}" for run in (doctor, gspo, plus, without_kl)]
    assert last[0] == last[1] == "40.1"
    ends = "end at 40.1 %, REINFORCE++ at {}, RLOO without KL at {}, and GRPO's best seed at {}"
    assert ends.format(*last[2:], best[1]) in text
    assert (late(plus), late(without_kl)) == ("+3.7", "+0.5")
    assert "REINFORCE++ gained 3.7, and RLOO without KL 0.5" in text
    assert (
        f"GSPO has {strict['GSPO'][1]} % and CISPO {strict['CISPO'][1]}, where GRPO's best seed has {best[0]}" in text
    )
    assert f"between {min(strict['CISPO'][1:])} and {max(strict['CISPO'][1:])} %" in text
    worst = min(run["held_out"]["strict"][-1] for run in GRPO)
    assert f"ends {100 * (worst - cispo['held_out']['strict'][-1]):.1f} points below GRPO's worst seed" in text
    shortest = min(cispo["curves"]["length"])
    assert f"{shortest:.0f} tokens at step {cispo['curves']['length'].index(shortest) + 1}" in text
    assert (late(doctor), late(gspo)) == ("+1.9", "-1.9") and f"GSPO, at {strict['GSPO'][3]} % after 60" in text
    assert f"towards the end, to {max(cispo['curves']['gap']):.4f}" in text
    entropy, length = (doctor["curves"][name] for name in ("entropy", "length"))
    per_token = (entropy[0] / length[0], mean(entropy[-tables.WINDOW :]) / mean(length[-tables.WINDOW :]))
    assert "{:.2f} and {:.2f} per token".format(*(320 * share for share in per_token)) in text
    alone = (median(run["curves"]["step_seconds"][first - 1 : last])
             for run, first, last in ((doctor, 1, 62), (gspo, 26, 50), (cispo, 46, 80)))  # fmt: skip
    words = "{:.2f} s in Dr.GRPO (steps 1 to 62), {:.2f} s in GSPO (26 to 50) and {:.2f} s in CISPO (46 to 80"
    assert words.format(*alone) in text


def test_what_the_page_says_of_what_helped_is_so():
    text = " ".join(PAGES[0].read_text().split())
    rows = {title: cells for title, _, *cells in tables.beside(RUNS)}
    assert f"of these {sum(map(len, rows.values()))} one might" in text
    sure = {title: [cell.strip("*")[0] if "*" in cell else "" for cell in cells] for title, cells in rows.items()}
    assert {title: signs for title, signs in sure.items() if any(signs)} == {
        "CISPO": ["-", "-", ""],
        "DAPO's set": ["+", "+", ""],
        "PPO": ["+", "", ""],
    }
    assert f"by up to {100 * sqrt(2 * 0.4 * 0.6 / 1319):.1f} points more" in text


def test_what_the_page_says_of_the_set_of_dapo_is_so():
    text = " ".join(PAGES[0].read_text().split())
    (run,), found = RUNS["dapo-0.5b"], experiment.load("dapo-0.5b").settings
    clips = [found[f"actor_rollout_ref.actor.clip_ratio_{side}"] for side in ("low", "high")]
    longest = found["data.max_response_length"] - found["reward_model.reward_kwargs.overlong_buffer_cfg.len"]
    assert "clipped at {} below and {} above one".format(*clips) in text and f"more than {longest} tokens lose" in text
    prompts, answers = 128, 128 * 8
    rounds, strict = run["curves"]["rounds"], [100 * share for share in run["held_out"]["strict"]]
    assert len(rounds) == 80 and f"{rounds[0]:.0f} batches in step 1" in text and f"{sum(rounds):.0f} in all" in text
    assert f"samples {sum(rounds) / 80:.1f} times as much" in text
    passes = [prompts * batches / 7473 for batches in (sum(rounds), 80)]
    assert (
        f"That is {answers * sum(rounds):,.0f} answers, {passes[0]:.1f} passes over the problems; "
        f"GRPO had {answers * 80:,} and {passes[1]:.1f}" in text
    )
    ends = [100 * one["held_out"]["strict"][-1] for one in GRPO]
    above = strict[-1] - max(ends)
    noise = standard_error(strict[-1] / 100, max(ends) / 100)
    assert f"ends {above:.1f} points above GRPO's best seed" in text and f"has {strict[-1]:.1f} % after 80" in text
    assert f"{above:.1f} points are {above / noise:.1f} standard errors of a difference" in text
    sampled = [
        (100 * run["sampled"]["after"]["strict"][name], tables.cell(tables.after(one, "strict", name) for one in GRPO))
        for name in tables.SAMPLED
    ]
    (share, others), (best, theirs) = ((ours, cell.split()[0]) for ours, cell in sampled)
    assert f"mean@8 {share:.1f} against {others}), pass@8 does not ({best:.1f} against {theirs})" in text
    reached = next(step for step in range(1, 81) if sum(rounds[:step]) >= 80)
    assert f"as GRPO in all its steps, DAPO's set was in step {reached}." in text
    assert run["held_out"]["step"][1:3] == [20, 40] and sum(rounds[:2]) > sum(rounds[:20]) / 2
    assert (
        f"it had sampled {answers * sum(rounds[:20]):,.0f}, more than half of them in steps 1 and 2, and had "
        f"{strict[1]:.1f} %; GRPO's worst seed had {min(ends):.1f} % with {answers * 80:,}" in text
    )
    updates = [prompts // experiment.load(name).settings["actor_rollout_ref.actor.ppo_mini_batch_size"]
               for name in ("dapo-0.5b", "grpo-0.5b")]  # fmt: skip
    assert 40 * updates[0] == 80 * updates[1], "after 40 steps as many optimizer steps as GRPO in all"
    assert (
        f"it had sampled {answers * sum(rounds[:40]):,.0f}, with as many optimizer steps as GRPO in all, and had "
        f"{strict[2]:.1f} %, which is {strict[2] - max(ends):.1f} points above GRPO's best seed" in text
    )
    assert late(run) == "+2.7" and "DAPO's set gained 2.7" in text and run["shared_device"]


def test_what_the_page_says_of_the_small_model_is_so():
    text = " ".join(PAGES[0].read_text().split())
    assert "trainer.total_epochs=3" in SMALL[0]["warm_up"] and "three epochs, 348 steps" in text
    assert 3 * (7473 // 64) == 348 and all(run["shared_device"] for run in SMALL)
    starts, ends = ([100 * run["held_out"]["strict"][place] for run in SMALL] for place in (0, -1))
    (before,) = set(starts)
    gains = [end - before for end in ends]
    assert "{:.1f} % become {:.1f}, {:.1f} and {:.1f}: gains of".format(before, *ends) in text
    assert "gains of {:.1f}, {:.1f} and {:.1f} points, {:.1f} in the mean".format(*gains, mean(gains)) in text
    noise = standard_error(mean(ends) / 100), standard_error(before / 100, mean(ends) / 100)
    assert "by {:.1f} points (one standard error), and a difference of two by {:.1f}".format(*noise) in text
    assert sum(gain > 2 * noise[1] for gain in gains) == 1 and "one seed of three is beyond twice that" in text
    after = [run["held_out"]["strict"][run["held_out"]["step"].index(60)] for run in SMALL]
    assert "After 60 steps the seeds had {:.1f}, {:.1f} and {:.1f} %".format(*(100 * share for share in after)) in text
    assert all(run["held_out"]["strict"] == run["held_out"]["lenient"] for run in SMALL)
    errors = []
    for name, unit in (("mean@8", " %"), ("pass@8", "")):
        (low,) = {run["sampled"]["before"]["strict"][name] for run in SMALL}
        shares = [run["sampled"]["after"]["strict"][name] for run in SMALL]
        errors += [100 * (share - low) / standard_error(low, share) for share in shares]
        shown = [f"{100 * share:.1f}" for share in (low, *shares)]
        assert "from {} to {}, {} and {}".format(*shown) + unit in text
    assert f"by at least {min(errors):.1f} standard errors of a difference over 1,319 problems" in text
    first, last, long, short, *_ = (cell.split()[0] for cell in tables.health(SMALL)[1:])
    assert f"rises from {first} to {last} % in 150 steps" in text and f"from {long} to {short} tokens" in text
    gap, larger = (max(max(run["curves"]["gap"]) for run in runs) for runs in (SMALL, GRPO))
    assert f"is {gap:.4f} at most**, twice" in text and round(gap / larger) == 2


def test_what_the_page_says_of_the_larger_model_is_so():
    text = " ".join(PAGES[0].read_text().split())
    runs = RUNS["grpo-1.5b"]
    strict = [[f"{100 * share:.1f}" for share in run["held_out"]["strict"]] for run in runs]
    ends = [100 * run["held_out"]["strict"][-1] for run in runs]
    small = [mean(tables.held_out(run, "strict", step) for run in GRPO) for step in (40, 80)]
    assert (
        f"{mean(ends):.1f} % after 40 steps, where the 0.5B model has {small[0]:.1f}, and {small[1]:.1f} after 80"
        in text
    )
    assert f"end within {max(ends) - min(ends):.1f} points of each other, and still rise" in text
    assert "by {}, {} and {} points".format(*(late(run).removeprefix("+") for run in runs)) in text
    assert "after 10 steps strict accuracy is {}, {} and {} %".format(*(found[1] for found in strict)) in text
    lenient = 100 * runs[0]["held_out"]["lenient"][3]
    assert f"seed 1 has {strict[0][3]} % strict and {lenient:.1f} lenient" in text
    assert f"the gap is {max(max(run['curves']['gap']) for run in runs):.4f} at most" in text
    (before,) = {run["sampled"]["before"]["lenient"]["mean@8"] for run in runs}
    after, best = (100 * mean(run["sampled"]["after"]["lenient"][name] for run in runs) for name in tables.SAMPLED)
    assert f"from {100 * before:.1f} to {after:.1f} %, and pass@8 from 75.1 to {best:.1f}" in text


def test_what_the_page_says_of_adapters_is_so():
    text = " ".join(PAGES[0].read_text().split())
    found = experiment.load("grpo-lora-0.5b").settings
    keys = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.actor.optim.lr"
    assert [found[key] for key in keys] == [32, 32, 3e-5] and "rank 32 on every linear layer, alpha 32" in text
    (beside,), (merged,) = ADAPTERS
    assert beside["shared_device"] and merged["shared_device"] and beside["commit"] == merged["commit"] == "5a81548"
    at = [[tables.held_out(run, "strict", step) for run in (*GRPO, beside, merged)] for step in (20, 40, 60)]
    words = "had {:.1f}, {:.1f} and {:.1f} % after 60 steps; adapters have {:.1f} beside the weights and {:.1f} merged"
    assert words.format(*at[-1]) in text
    early, *later = (shares[-2] - shares[-1] for shares in at)
    assert f"are {early:.1f} points apart, after 40 and 60 steps {later[0]:.1f} and {later[1]:.1f}" in text
    first, second = ([reached(run, level) for run in (merged, beside)] for level in (0.1, 0.3))
    assert "10 % in step {}, and in step {} beside the weights; 30 % in step {} and {}".format(*first, *second) in text
    assert "10 % in steps {}, {} and {}".format(*(reached(run, 0.1) for run in GRPO)) in text
    gaps = [max(run["curves"]["gap"]) for run in (beside, merged)]
    assert f"merged or not: {max(gaps):.4f} at most" in text
    peaks = [max(run["curves"]["memory_gib"]) for run in (beside, merged, *GRPO)]
    assert f"{peaks[0]:.1f} and {peaks[1]:.1f} GiB, where all weights take {mean(peaks[2:]):.1f}" in text


def reached(run: dict[str, Any], level: float) -> int:
    """First step after which the reward, smoothed as in the picture, is as high."""
    return next(step for step, reward in enumerate(smooth(run["curves"]["reward"]), 1) if reward >= level)


def test_what_the_page_says_of_programs_is_so():
    text = " ".join(PAGES[0].read_text().split())
    (run,) = RUNS["grpo-code-1.5b"]
    made, compared = run["programs"], run["programs"]["held_out"]
    assert f"{made['train']:,} [problems]" in text and f"of {made['families']} families" in text
    assert (compared["shared_names"], compared["shared_runs"]) == (0, 0)
    assert f"{compared['run']} words in a row are shared ({compared['longest_run']} at most)" in text
    shares = [100 * run["sampled"][when]["passed"]["mean@8"] for when in ("before", "after")]
    assert "from {:.1f} to {:.1f} %: by {:.1f} points".format(*shares, shares[1] - shares[0]) in text
    passed = [100 * share for share in run["held_out"]["passed"]]
    assert f"{passed[0]:.1f} to {passed[-1]:.1f} %, 15 problems gained and 12 lost" in text
    assert round(1.64 * (passed[-1] - passed[0])) == 15 - 12
    waits = run["curves"]["reward_seconds"]
    assert (
        f"In {sum(wait > 1 for wait in waits)} of {len(waits)} steps" in text and f"{max(waits):.1f} s at most" in text
    )
    assert f"{100 * max(run['curves']['late']):.1f} % of a step's at most" in text
    rewards = run["curves"]["reward"]
    assert f"rises from {100 * rewards[0]:.1f} to {100 * mean(rewards[-tables.WINDOW :]):.1f} %" in text
    assert made["train"] // 64 == 43, "an epoch, whose problems come again from step 44 on"


def test_what_the_page_says_of_the_calculator_after_supervised_training_is_so():
    text = " ".join(PAGES[0].read_text().split())
    with_tool, without = (
        [[f"{100 * share:.1f}" for share in run["held_out"]["strict"]] for run in runs]
        for runs in (WITH_TOOL, WITHOUT_TOOL)
    )
    (before,) = {strict[0] for strict in with_tool}
    first, other, same = (strict[0] for strict in without)
    assert other == same, "seeds 2 and 3 start from one model"
    assert (
        f"conversations are right in {before} %, answers without a tool in {other} %, or {first} % after another"
        in text
    )
    ends = ["{}, {} and {} %".format(*(strict[-1] for strict in arm)) for arm in (with_tool, without)]
    assert "Accuracy ends at {}, and without a tool at {}".format(*ends) in text
    worst, best = (
        pick(run["held_out"]["strict"][-1] for run in runs) for pick, runs in ((min, WITHOUT_TOOL), (max, WITH_TOOL))
    )
    assert f"the worst seed without one is {100 * (worst - best):.1f} points above the best with one" in text
    calls, lost = ([run["curves"][name][0] for run in WITH_TOOL] for name in ("calls", "malformed"))
    assert f"has {min(calls):.2f} to {max(calls):.2f} calls that can be read" in text
    assert f"and {min(lost):.2f} to {max(lost):.2f} that cannot" in text
    rewards = [100 * mean(run["curves"]["reward"][0] for run in runs) for runs in (WITH_TOOL, WITHOUT_TOOL)]
    assert "its reward is {:.1f} % where answers without a tool have {:.1f}".format(*rewards) in text
    assert all(run["shared_device"] for run in (*WITHOUT_TOOL, *WITH_TOOL)) and "All runs shared the device" in text


def test_what_the_page_says_of_calls_in_plain_text_is_so():
    text = " ".join(PAGES[0].read_text().split())
    assert {(run["finished"], run["curves"]["step"][-1]) for run in TEXT_CALLS} == {(True, 60)}
    calls = [[run["curves"]["calls"][place] for run in TEXT_CALLS] for place in (0, -1)]
    (low, high), (least, most) = ((f"{min(part):.2f}", f"{max(part):.2f}") for part in calls)
    assert f"has {low} to {high} calls at the first step and {least} to {most} at the last" in text
    curves = [run["curves"] for run in TEXT_CALLS]
    lost = max(map(sum, (pair for one in curves for pair in zip(one["failed"], one["malformed"], strict=True))))
    assert f"at no step more than {lost:.2f} without a result" in text
    with_tool, without = ([run["held_out"]["strict"] for run in runs] for runs in (TEXT_CALLS, WITHOUT_TOOL))
    for place, between in ((1, ", and those without a tool "), (-1, " against ")):
        shown = [f"{100 * strict[place]:.1f}" for strict in (*with_tool, *without)]
        assert ("{}, {} and {} %" + between + "{}, {} and {}").format(*shown) in text
    ends, others = ([strict[-1] for strict in arm] for arm in (with_tool, without))
    assert f"is {100 * (min(ends) - max(others)):.1f} points above the best without a tool" in text
    apart = [100 * (mean(s[place] for s in with_tool) - mean(s[place] for s in without)) for place in (-1, 0)]
    assert "means are {:.1f} apart, where they were {:.1f} apart before GRPO".format(*apart) in text


def test_what_the_page_says_of_the_calculator_by_an_example_is_so():
    text = " ".join(PAGES[0].read_text().split())
    (free,), (paid,) = (RUNS[f"grpo-calculator{name}-0.5b"] for name in ("", "-used"))
    assert not free["finished"] and not paid["finished"]
    assert f"the first after {free['curves']['step'][-1]} steps" in text
    assert f"the second after {paid['curves']['step'][-1]}, when" in text
    calls, length, reward = (free["curves"][name] for name in ("calls", "length", "reward"))
    assert f"{calls[0]:.2f} calls at the first step, {calls[6]:.2f} at step 7 and {calls[10]:.3f} at step 11" in text
    assert f"from {length[0]:.0f} to {length[-1]:.0f} tokens and the reward from {100 * reward[0]:.1f} to " in text
    assert f"to {100 * reward[-1]:.1f} %: the model learns to reason in words" in text
    step, strict = paid["held_out"]["step"], [f"{100 * share:.1f}" for share in paid["held_out"]["strict"]]
    assert step == [10, 20, 30, 40, 50, 60] and f"{strict[1]} % after 20 steps and stays between" in text
    assert f"between {min(strict[2:])} and {max(strict[2:])} % from step 30 on" in text
    assert f"with {paid['held_out']['length'][-1]:.0f} tokens a conversation" in text
    without = [run["held_out"]["length"][run["held_out"]["step"].index(60)] for run in GRPO]
    assert f"with {min(without):.0f} to {max(without):.0f} tokens" in text
    rollouts = [mean(median(run["curves"]["rollout_seconds"]) for run in runs) for runs in ([paid], GRPO)]
    assert "A rollout takes {:.2f} s where GRPO's takes {:.2f}".format(*rollouts) in text


def standard_error(*shares: float) -> float:
    """In points, of an accuracy over GSM8K's test set, or of the difference of two."""
    return 100 * sqrt(sum(share * (1 - share) / 1319 for share in shares))


def mean_step(runs):
    return mean(median(run["curves"]["step_seconds"]) for run in runs)


def late(run):
    """Points gained from the last validation but one to the last."""
    strict = run["held_out"]["strict"]
    return f"{100 * (strict[-1] - strict[-2]):+.1f}"


def test_both_languages_hold_the_same_numbers_and_commands():
    english, chinese = (page.read_text() for page in PAGES)
    first, second = (Counter(re.findall(r"\d+(?:\.\d+)?", text)) for text in (english, chinese))
    assert (first - second, second - first) == (Counter(), Counter())
    commands = [re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) for text in (english, chinese)]
    assert commands[0] == commands[1]


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
    write_splits(tmp_path / "data", rows, humaneval.schema())
    (tmp_path / "data" / "programs.json").write_text('{"train": 4}')
    run = run_two_steps("grpo-code-0.5b", tmp_path, "data.max_prompt_length=2048")
    assert run["programs"] == {"train": 4} and len(run["held_out"]["passed"]) == 2
    assert run["sampled"]["after"].keys() == run["sampled"]["before"].keys() == {records.PASSED}
    assert {"reward_seconds", "late"} <= run["curves"].keys()
    assert json.loads((tmp_path / "out/start-qwen2.5-coder-0.5b-instruct-programs.json").read_text())["prompts"] == 4
