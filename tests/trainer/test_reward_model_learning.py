"""PPO with a trained reward model learns the embedded task on every seed: committed runs show it, fresh ones follow."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT

from benchmarks.reward_model_curves import Run, measure

CURVES = ROOT / "docs/curves/reward_model.json"
if not CURVES.is_file():
    pytest.skip("made by benchmarks/reward_model_curves.py, which takes an hour", allow_module_level=True)
COMMITTED = json.loads(CURVES.read_text())["runs"]
SEEDS = (1, 2, 3)
PAIRS = 0.95  # of held-out pairs, the reward model must rank right
RISE = 0.30  # of sampled accuracy on sums that neither model was trained on
BESIDE = 0.10  # how far from the committed runs another machine's rounding may lead


def last(values: dict[str, float]) -> float:
    return list(values.values())[-1]


def learnt(run: Run) -> bool:
    """By the rule, which training never asks: a policy that only pleases the reward model fails here."""
    sampled, greedy = run["sampled"], list(run["greedy"].values())
    by_rule = sampled["after"] - sampled["before"] >= RISE and greedy[-1] > greedy[0] + 0.05
    return by_rule and last(run["pairs"]) >= PAIRS and sum(run["reward"][-10:]) > sum(run["reward"][:10])


def within(value: float, band: list[float]) -> bool:
    return min(band) - BESIDE <= value <= max(band) + BESIDE


def test_the_committed_runs_of_every_seed_learnt():
    assert sorted(run["seed"] for run in COMMITTED) == list(SEEDS)
    assert [run["seed"] for run in COMMITTED if not learnt(run)] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fresh_run_learns_within_the_band_of_the_committed_ones(seed, tmp_path):
    fresh = measure(seed, tmp_path)
    assert learnt(fresh)
    for step, value in fresh["greedy"].items():
        assert within(value, [run["greedy"][step] for run in COMMITTED]), f"greedy accuracy at step {step}"
    for when, value in fresh["sampled"].items():
        assert within(value, [run["sampled"][when] for run in COMMITTED]), f"sampled accuracy {when}"
    assert within(last(fresh["pairs"]), [last(run["pairs"]) for run in COMMITTED]), "accuracy of the reward model"
