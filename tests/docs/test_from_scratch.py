"""examples/grpo_from_scratch.py trains, and its formulas are those of the package."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import ROOT

from paddock.algorithms.advantages import compute_advantages
from paddock.algorithms.losses import policy_loss_terms
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.masked import Denominators
from paddock.engines.train.base import Outputs
from paddock.facts.modules import module_at
from paddock.workers.policy import loss_inputs

EXAMPLE = ROOT / "examples" / "grpo_from_scratch.py"


@pytest.fixture(autouse=True)
def _same_path_afterwards(monkeypatch):
    """Loading the example puts examples/ on the path, where a folder has the name of trl."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_it_trains(capsys):
    accuracy = module_at(str(EXAMPLE)).main(steps=1)
    said = capsys.readouterr().out
    assert 0.5 < accuracy < 1.0 and said.startswith("before: 64.8% of 512 held-out sums\nstep 1: reward ")


def test_its_advantages_and_its_loss_are_those_of_the_estimator_and_of_the_policy_loss():
    example, config = module_at(str(EXAMPLE)), Config()
    torch.manual_seed(0)
    rows, width = 8, 5
    mask = (torch.arange(width) < torch.tensor([5, 3, 1, 4, 2, 5, 5, 1])[:, None]).long()
    batch = Batch(
        row=torch.arange(rows), group=torch.arange(rows) // 4, prompts=torch.ones(rows, 2), mask=mask,
        scores=torch.rand(rows, width) * mask, old_log_probs=torch.randn(rows, width) - 2.0,
    )  # fmt: skip
    config.algorithm.adv_estimator = "grpo"
    wanted = compute_advantages(batch.with_(rewards=batch.scores), config.algorithm)
    found = example.with_advantages(batch)
    assert torch.equal(found.advantages, wanted.advantages)
    log_probs = (batch.need("old_log_probs") + 0.5 * torch.randn(rows, width)).requires_grad_()
    denominators = Denominators.count(mask)
    ours, _ = example.loss(denominators, found, Outputs(log_probs=log_probs))
    actor = config.actor_rollout_ref.actor
    actor.loss_agg_mode, actor.clip_ratio_c = "token-mean", 1e9  # without the bound of dual-clip PPO
    theirs, _ = policy_loss_terms(loss_inputs(found, log_probs, True), actor, denominators)
    (gradient,) = torch.autograd.grad(ours, log_probs, retain_graph=True)
    (expected,) = torch.autograd.grad(theirs, log_probs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, expected)
