"""A larger model teaches the embedded one: committed curves of every seed show it, and so does a fresh run."""

from __future__ import annotations

import json
from statistics import mean

import pytest
from conftest import ROOT

from benchmarks.distillation_curves import METHODS, Run, draw, measure, train_teacher

COMMITTED = json.loads((ROOT / "docs/curves/distillation.json").read_text())
SEEDS = [1, 2, 3]
LAST = str(COMMITTED["steps"])


def committed(method: str) -> list[Run]:
    return [run for run in COMMITTED["runs"] if run["method"] == method]


def after(method: str, step: str = LAST) -> list[float]:
    return [run["sampled"][step] for run in committed(method)]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_was_run_on_every_seed_and_learnt(method):
    assert sorted(run["seed"] for run in committed(method)) == SEEDS
    assert min(after(method)) > 1.5 * COMMITTED["runs"][0]["sampled"]["0"]


@pytest.mark.parametrize("method", ["reward", "loss"])
def test_on_as_many_answers_every_distilled_seed_is_ahead_of_grpo(method):
    for step in committed("sft")[0]["sampled"]:
        assert min(after(method, step)) > max(after("grpo", step))
    assert max(after(method)) < COMMITTED["teacher"]["sampled"]


def test_as_a_loss_distillation_is_a_point_or_two_behind_sft_on_the_teachers_answers():
    assert 0.01 < mean(after("sft")) - mean(after("loss")) < 0.025


def test_the_committed_picture_shows_the_committed_curves():
    assert (ROOT / "docs/images/distillation.svg").read_text() == draw(COMMITTED)


def test_the_numbers_of_the_guide_are_those_that_were_measured():
    def span(numbers: list[float]) -> str:
        low, high = f"{min(numbers):.0f}", f"{max(numbers):.0f}"
        return low if low == high else f"{low}-{high}"

    for language in ("en", "zh"):
        page = (ROOT / "docs" / language / "distillation.md").read_text()
        assert f"{COMMITTED['teacher']['sampled']:.0%}".replace("%", " %") in page
        for method in METHODS:
            shares = [span([100 * share for share in after(method, step)]) for step in ("10", "20", LAST)]
            spent = span([run["seconds"]["command_cpu"] for run in committed(method)])
            row = " | ".join([*(f"{share} %" for share in shares), spent])
            assert f"| {row} |" in page, (language, method, row)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reward", "loss"])
def test_a_fresh_run_learns_as_the_committed_ones_did(method, tmp_path):
    train_teacher(tmp_path)
    run = measure(tmp_path, method, 1, COMMITTED["steps"], tmp_path / "run")
    assert run["sampled"][LAST] == pytest.approx(mean(after(method)), abs=0.1)
