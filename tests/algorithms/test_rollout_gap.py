"""Gap of probabilities between rollout and trainer: shares of micro-batches give what the whole batch gives."""

from __future__ import annotations

import math

import pytest
import torch

from paddock.algorithms.rollout_gap import gap_metrics, gap_shares
from paddock.core.masked import Denominators
from paddock.engines.train.base import join_shares
from paddock.trainer.metrics import mismatch, to_floats

P = torch.tensor([[0.2, 0.4, 0.6], [0.8, 1, 1], [1, 1, 1]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.5, 0.6], [0.7, 0.1, 0.1], [0.1, 0.1, 0.1]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


def in_parts(p: torch.Tensor, q: torch.Tensor, parts: list[list[int]]) -> dict[str, float]:
    counts, totals = Denominators.count(MASK), dict[str, torch.Tensor]()
    for rows in parts:
        for name, share in gap_shares(p[rows].log(), q[rows].log(), MASK[rows], counts).items():
            totals[name] = join_shares(name, totals[name], share) if name in totals else share
    return gap_metrics({name: float(total) for name, total in totals.items()}, counts.tokens)


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]]])
def test_shares_of_micro_batches_give_the_values_worked_by_hand(parts):
    # gaps 0, .1, 0, .1: mean .05, sum of squares .02; p - .5: -.3 -.1 .1 .3; q - .5: -.3 0 .1 .2
    assert in_parts(P, Q, parts) == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": 0.05,
            "training/rollout_probs_diff_max": 0.1,
            "training/rollout_probs_diff_std": math.sqrt((0.02 - 4 * 0.0025) / 3),
            "training/rollout_actor_probs_pearson_corr": 0.16 / math.sqrt(0.2 * 0.14),
        }
    )


def test_shares_agree_with_the_metrics_of_a_whole_batch():
    whole = to_floats(mismatch(P.log(), Q.log(), MASK != 0))
    assert in_parts(P, Q, [[0], [1, 2]]) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize(("other", "correlation"), [(0.3, 1.0), (0.25, 0.0)])
def test_constant_probabilities_correlate_only_if_they_are_equal(other, correlation):
    found = in_parts(torch.full((3, 3), 0.3), torch.full((3, 3), other), [[0], [1], [2]])
    assert found["training/rollout_actor_probs_pearson_corr"] == correlation


def test_metrics_without_a_rollout_pass_unchanged():
    assert gap_metrics({"actor/pg_loss": 0.5}, 10) == {"actor/pg_loss": 0.5}


def test_a_share_that_is_a_maximum_is_not_added():
    assert join_shares("a_max", 2.0, 3.0) == 3.0 and join_shares("a", 2.0, 3.0) == 5.0
    assert join_shares("a_max", torch.tensor(2.0), torch.tensor(1.0)) == 2.0
