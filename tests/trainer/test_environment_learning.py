"""The embedded models learn in the built-in environments: committed curves of every seed show it, a fresh run too."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT

from benchmarks.environment_curves import TASKS, Run, draw, measure

COMMITTED = json.loads((ROOT / "docs/curves/environments.json").read_text())
SEEDS = [1, 2, 3]


def committed(task: str) -> list[Run]:
    return [run for run in COMMITTED["runs"] if run["task"] == task]


def learnt(run: Run) -> bool:
    """With the tool most products are right and without it none is; in the game the reward is three times what it
    was."""
    greedy = list(run["greedy"].values())
    if run["task"] == "no_tool":
        return greedy[-1] < 0.02 and max(run["reward"]) < 0.02
    if run["task"] == "tool":
        return greedy[-1] > 0.8 and run["reward"][-1] > 0.8 > 3 * run["reward"][0]
    return greedy[-1] > 2.5 * greedy[0] and run["reward"][-1] > 3 * run["reward"][0]


@pytest.mark.parametrize("task", TASKS)
def test_the_committed_runs_of_every_seed_show_what_the_page_says(task):
    runs = committed(task)
    assert sorted(run["seed"] for run in runs) == SEEDS
    assert [run["seed"] for run in runs if not learnt(run)] == []


def test_with_the_tool_the_policy_calls_it_ever_more():
    for run in committed("tool"):
        calls = run["tool_call_counts/mean"]
        assert calls[0] < 0.6 and sum(calls[-10:]) / 10 > 0.95


def test_the_committed_picture_shows_the_committed_curves():
    assert (ROOT / "docs/images/environments.svg").read_text() == draw(COMMITTED)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_fresh_run_learns_as_the_committed_ones_did(task, tmp_path):
    assert learnt(measure(task, 1, COMMITTED["steps"], tmp_path))
