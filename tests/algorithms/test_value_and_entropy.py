"""The value loss, the entropy bonus and the KL term against loops and values worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from paddock.algorithms.losses import LossInputs, entropy, policy_loss_terms, value_loss
from paddock.core.masked import AGGREGATIONS, Denominators

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


def draw(seed, low=-1.0, high=1.0, shape=(4, 4)):
    random = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=random, dtype=torch.float64) * (high - low) + low


def critic(mode="token-mean", cliprange_value=0.5):
    return SimpleNamespace(cliprange_value=cliprange_value, loss_agg_mode=mode)


def actor(**keys):
    defaults = {
        "clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean", "entropy_coeff": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.2,
        "kl_loss_type": "low_var_kl", "policy_loss": SimpleNamespace(loss_mode="vanilla"),
    }  # fmt: skip
    return SimpleNamespace(**(defaults | keys))


def slow_value_loss(values, old, returns, mode, limit):
    rows, clipped, seen = [], 0, []
    for i in range(4):
        row = []
        for t in range(4):
            if MASK[i, t]:
                v, o, r = values[i, t], old[i, t].item(), returns[i, t].item()
                bounded = min(max(v, o - limit), o + limit) if not o - limit <= v <= o + limit else v
                first, second = (v - r) ** 2, (bounded - r) ** 2
                row.append(second if second > first else first)
                clipped += bool(second > first)
                seen.append(v.item())
        rows.append(row)
    full, total = [row for row in rows if row], sum(sum(row) for row in rows)
    loss = {
        "token-mean": total / len(seen),
        "seq-mean-token-sum": total / len(full),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in full) / len(full),
        "seq-mean-token-sum-norm": total / len(full) / 4,
        "token-sum": total,
    }[mode]
    return loss / 2, clipped / len(seen), sum(seen) / len(seen)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_value_loss_its_gradient_and_metrics_match_a_slow_loop(mode):
    values, old, returns = draw(0).requires_grad_(), draw(1), draw(2)
    loss, metrics = value_loss(values, old, returns, MASK, critic(mode), Denominators.count(MASK))
    slow, clipfrac, mean = slow_value_loss(values, old, returns, mode, 0.5)
    torch.testing.assert_close(loss, slow, rtol=1e-6, atol=1e-9)
    (gradient,), (slow_gradient,) = torch.autograd.grad(loss, values), torch.autograd.grad(slow, values)
    torch.testing.assert_close(gradient, slow_gradient, rtol=1e-6, atol=1e-9)
    assert 0 < clipfrac < 1
    found = {name: value.item() for name, value in metrics.items()}
    expected = {"critic/vf_loss": slow.item(), "critic/vf_clipfrac": clipfrac, "critic/vpred_mean": mean}
    assert found == pytest.approx(expected, rel=1e-6)


def test_golden_value_loss():
    one = torch.ones(1, 1)
    loss, metrics = value_loss(0.6 * one, 0 * one, 0.7 * one, one, critic(), Denominators.count(one))
    assert loss.item() == pytest.approx(0.02) and metrics["critic/vf_clipfrac"] == 1


def test_value_loss_of_micro_batches_adds_up_to_the_whole():
    values, old, returns, counts = draw(3), draw(4), draw(5), Denominators.count(MASK)
    for mode in AGGREGATIONS:
        whole, whole_metrics = value_loss(values, old, returns, MASK, critic(mode), counts)
        parts = [
            value_loss(values[rows], old[rows], returns[rows], MASK[rows], critic(mode), counts)
            for rows in torch.arange(4).split([1, 2, 1])
        ]
        torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
        for name, value in whole_metrics.items():
            torch.testing.assert_close(sum(metrics[name] for _, metrics in parts), value)


def test_value_loss_ignores_what_stands_outside_the_mask():
    values, old, returns, counts = draw(6), draw(7), draw(8), Denominators.count(MASK)
    clean, _ = value_loss(values, old, returns, MASK, critic(), counts)
    dirty = [x.masked_fill(MASK == 0, math.nan) for x in (values, old, returns)]
    dirty[0].requires_grad_()
    loss, _ = value_loss(*dirty, MASK, critic(), counts)
    assert loss == clean
    (gradient,) = torch.autograd.grad(loss, dirty[0])
    assert (gradient[MASK == 0] == 0).all() and gradient.isfinite().all()


def test_entropy_is_minus_the_mean_log_probability():
    logits = draw(9, -3, 3, (2, 3, 5)).requires_grad_()
    found = entropy(logits)
    slow = torch.zeros(2, 3, dtype=torch.float64)
    for i in range(2):
        for t in range(3):
            p = torch.exp(logits[i, t]) / torch.exp(logits[i, t]).sum()
            slow[i, t] = -(p * p.log()).sum()
    torch.testing.assert_close(found, slow)
    (gradient,), (slow_gradient,) = torch.autograd.grad(found.sum(), logits), torch.autograd.grad(slow.sum(), logits)
    torch.testing.assert_close(gradient, slow_gradient)
    torch.testing.assert_close(entropy(torch.zeros(7)), torch.tensor(math.log(7)))


def test_entropy_of_half_precision_logits_is_computed_in_float32():
    logits = torch.linspace(-20, 20, 1000, dtype=torch.bfloat16)
    torch.testing.assert_close(entropy(logits), entropy(logits.float()), rtol=0, atol=0)
    assert entropy(logits).dtype == torch.float32


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k1+", "k3+"])
def test_the_loss_is_policy_minus_entropy_bonus_plus_kl(kind, mode):
    new = draw(10, -2, -0.1).requires_grad_()
    x = LossInputs(new, new.detach() + draw(11, -0.3, 0.3), draw(12), MASK)
    h, reference = draw(13, 0, 2).requires_grad_(), new.detach() + draw(14, -0.4, 0.4)
    counts = Denominators.count(MASK)
    plain, _ = policy_loss_terms(x, actor(loss_agg_mode=mode), counts)
    config = actor(loss_agg_mode=mode, entropy_coeff=0.3, use_kl_loss=True, kl_loss_type=kind)
    loss, metrics = policy_loss_terms(x, config, counts, h, reference)
    d = new - reference
    k2 = d.square() / 2
    k3 = torch.exp(-d) + d - 1
    value = {"kl": d, "abs": d.abs(), "mse": k2, "low_var_kl": k3, "k1+": d, "k3+": k3}[kind]
    gradient = d if kind.endswith("+") else torch.autograd.grad(value.sum(), new, retain_graph=True)[0]
    divisor = {
        "token-mean": 8.0,
        "seq-mean-token-sum": 3.0,
        "seq-mean-token-mean": 3.0 * MASK.sum(-1, keepdim=True).clamp(min=1),
        "seq-mean-token-sum-norm": 12.0,
        "token-sum": 1.0,
    }[mode]
    bonus, kl = (h * MASK / divisor).sum(), (value * MASK / divisor).sum()
    torch.testing.assert_close(loss, plain - 0.3 * bonus + 0.2 * kl)
    own, own_h = torch.autograd.grad(loss, (new, h), retain_graph=True)
    torch.testing.assert_close(own_h, -0.3 * MASK / divisor * torch.ones_like(h))
    torch.testing.assert_close(own, torch.autograd.grad(plain, new)[0] + 0.2 * (gradient * MASK / divisor).detach())
    found = {name: metrics[f"actor/{name}"].item() for name in ("entropy", "kl_loss", "kl_coef", "pg_loss")}
    expected = {"entropy": bonus.item(), "kl_loss": kl.item(), "kl_coef": 0.2, "pg_loss": plain.item()}
    assert found == pytest.approx(expected)


def test_entropy_without_a_bonus_is_reported_and_leaves_no_gradient():
    new, h = draw(15, -2, -0.1).requires_grad_(), draw(16, 0, 2).requires_grad_()
    loss, metrics = policy_loss_terms(
        LossInputs(new, new.detach(), draw(17), MASK), actor(), Denominators.count(MASK), h
    )
    assert metrics["actor/entropy"].item() == pytest.approx((h * MASK).sum().item() / 8)
    assert torch.autograd.grad(loss, h, allow_unused=True)[0] is None


def test_a_kl_term_needs_reference_log_probs():
    x = LossInputs(draw(18), draw(19), draw(20), MASK)
    with pytest.raises(ValueError, match="ref_log_probs"):
        policy_loss_terms(x, actor(use_kl_loss=True), Denominators.count(MASK))


def test_a_reference_that_forbids_a_masked_token_leaves_gradients_finite():
    new = draw(21, -2, -0.1).requires_grad_()
    reference = new.detach().masked_fill(MASK == 0, -math.inf)
    x = LossInputs(new, new.detach(), draw(22), MASK)
    loss, _ = policy_loss_terms(x, actor(use_kl_loss=True), Denominators.count(MASK), None, reference)
    assert torch.autograd.grad(loss, new)[0].isfinite().all()
