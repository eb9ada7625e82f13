from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from paddock.algorithms.kl import AdaptiveKL, KLController, kl_controller, kl_divergence, penalise
from paddock.config.schema import KLControlConfig
from paddock.core.batch import Batch
from paddock.errors import UserError

ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
VALUES = {"k1": 0.5, "abs": 0.5, "k2": 0.125, "k3": 0.106531}
SLOPES = {"k1": 1.0, "abs": 1.0, "k2": 0.5, "k3": 1 - math.exp(-0.5)}


def value_and_slope(log_prob: float, ref: float, kind: str) -> tuple[float, float]:
    policy = torch.tensor(log_prob, requires_grad=True)
    kl = kl_divergence(policy, torch.tensor(ref), kind)
    kl.backward()
    return kl.item(), policy.grad.item()


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "kl", "mse", "low_var_kl"])
def test_estimators_match_values_worked_by_hand(kind):
    value, slope = value_and_slope(-0.7, -1.2, kind)
    name = ALIASES.get(kind, kind)
    assert value == pytest.approx(VALUES[name], abs=1e-6)
    assert slope == pytest.approx(SLOPES[name], abs=1e-6)


@pytest.mark.parametrize("kind", ["k1+", "abs+", "k2+", "k3+", "kl+", "mse+", "low_var_kl+"])
def test_trap_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    value, slope = value_and_slope(-0.7, -1.2, kind)
    assert value == pytest.approx(VALUES[ALIASES.get(kind[:-1], kind[:-1])], abs=1e-6)
    assert slope == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(("d", "expected"), [(-30.0, 10.0), (-4.0, 10.0), (30.0, 10.0)])
def test_k3_is_bounded_and_has_no_gradient_at_its_bounds(d, expected):
    assert value_and_slope(d, 0.0, "k3") == (expected, 0.0)


def test_an_unknown_estimator_is_answered_with_the_closest():
    with pytest.raises(UserError, match="did you mean 'low_var_kl'"):
        kl_divergence(torch.zeros(1), torch.zeros(1), "low_var_k")


@pytest.mark.parametrize("kind", ["full", "full+"])
def test_full_is_refused_by_name_with_the_reason(kind):
    with pytest.raises(UserError, match="whole vocabulary"):
        kl_divergence(torch.zeros(1), torch.zeros(1), kind)


def test_the_adaptive_coefficient_moves_as_worked_by_hand():
    controller = AdaptiveKL(0.001, target=0.1, horizon=10000)
    controller.update(current_kl=0.3, rows=5120)
    assert controller.coefficient == pytest.approx(0.001102, abs=5e-7)
    controller = AdaptiveKL(0.001, target=0.1, horizon=10000)
    controller.update(current_kl=0.09, rows=5000)
    assert controller.coefficient == pytest.approx(0.001 * (1 - 0.1 * 0.5))


def test_a_controller_resumes_from_its_state():
    first, second = AdaptiveKL(0.2, 0.1, 100), AdaptiveKL(0.5, 0.1, 100)
    first.update(0.3, 10)
    second.load_state_dict(first.state_dict())
    assert second.coefficient == first.coefficient != 0.2


def test_the_controller_follows_the_config():
    fixed = kl_controller(KLControlConfig())
    assert type(fixed) is KLController and fixed.coefficient == 0.001
    fixed.update(5.0, 100)
    assert fixed.coefficient == 0.001
    adaptive = kl_controller(KLControlConfig(type="adaptive", kl_coef=0.2, horizon=50, target_kl=0.3))
    assert isinstance(adaptive, AdaptiveKL)
    assert (adaptive.coefficient, adaptive.horizon, adaptive.target) == (0.2, 50, 0.3)
    with pytest.raises(UserError, match="did you mean 'adaptive'"):
        kl_controller(SimpleNamespace(type="adaptiv"))


def test_the_penalty_falls_on_valid_tokens_and_the_controller_moves_after_it_was_used():
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 0]])
    batch = Batch(
        row=torch.arange(2),
        group=torch.arange(2),
        prompts=torch.zeros(2, 1),
        mask=mask,
        scores=torch.tensor([[0.0, 1, 0], [2, 0, 0]]),
        old_log_probs=torch.tensor([[-1.0, -2, 5], [-3, 5, 5]]),
        ref_log_probs=torch.tensor([[-1.5, -1, 0], [-3.6, 0, 0]]),
    )
    controller = AdaptiveKL(0.1, target=0.1, horizon=4)
    penalised, metrics = penalise(batch, "kl", controller)
    expected = torch.tensor([[-0.05, 1 + 0.1, 0], [2 - 0.06, 0, 0]])
    assert torch.allclose(penalised.need("rewards"), expected)
    kl = ((0.5 - 1) / 2 + 0.6) / 2
    assert metrics == pytest.approx({"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": 0.1})
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.2 * 2 / 4))
