"""PPO, GRPO and RLOO learn the embedded default on every seed: committed curves show it, a fresh run follows them."""

from __future__ import annotations

import json
from statistics import mean

import pytest
from conftest import ROOT

from benchmarks.learning_curves import NAME, Run, draw, measure

COMMITTED = json.loads((ROOT / "docs/curves/learning_curves.json").read_text())
SEEDS = (1, 2, 3)
RISE = 0.40  # of sampled accuracy on pairs that training never sees
BESIDE = 0.08  # how far from the committed curves another machine's rounding may lead
WINDOW = 10  # steps


def committed(algorithm: str) -> list[Run]:
    return [run for run in COMMITTED["runs"] if run["algorithm"] == algorithm]


def learnt(run: Run) -> bool:
    sampled, greedy = run["sampled"], list(run["greedy"].values())
    return sampled["after"] - sampled["before"] >= RISE and greedy[-1] > greedy[0]


def windows(run: Run) -> list[float]:
    """Means over windows of steps: single steps are 512 coin flips."""
    return [mean(run["reward"][start : start + WINDOW]) for start in range(0, len(run["reward"]), WINDOW)]


def within(value: float, band: list[float]) -> bool:
    return min(band) - BESIDE <= value <= max(band) + BESIDE


@pytest.mark.parametrize("algorithm", NAME)
def test_the_committed_runs_of_every_seed_learnt(algorithm):
    runs = committed(algorithm)
    assert sorted(run["seed"] for run in runs) == list(SEEDS)
    assert [run["seed"] for run in runs if not learnt(run)] == []


def test_the_committed_picture_shows_the_committed_curves():
    assert (ROOT / "docs/images/learning_curves.svg").read_text() == draw(COMMITTED)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", NAME)
def test_a_fresh_run_learns_within_the_band_of_the_committed_curves(algorithm, tmp_path):
    runs, fresh = committed(algorithm), measure(algorithm, SEEDS[0], COMMITTED["steps"], tmp_path)
    assert learnt(fresh)
    for place, value in enumerate(windows(fresh)):
        assert within(value, [windows(run)[place] for run in runs]), f"reward of steps {place * WINDOW + 1} and on"
    for step, value in fresh["greedy"].items():
        assert within(value, [run["greedy"][step] for run in runs]), f"greedy accuracy at step {step}"
    for when, value in fresh["sampled"].items():
        assert within(value, [run["sampled"][when] for run in runs]), f"sampled accuracy {when}"
