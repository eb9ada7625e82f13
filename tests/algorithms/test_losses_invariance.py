"""How a mini-batch is split, ordered or padded changes no loss, no gradient and no metric."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from paddock.algorithms.losses import POLICY_LOSS, LossInputs, policy_loss_terms
from paddock.core.masked import AGGREGATIONS, Denominators

REJECT = {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "1.3,0.05"}
BYPASS = {
    "bypass_mode: ppo_clip": {"loss_type": "ppo_clip"} | REJECT,
    "bypass_mode: weights": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.7_1.5"},
    "bypass_mode: normalised": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
    "bypass_mode: normalised rows": {
        "loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True, **REJECT,
    },
}  # fmt: skip
CASES = [
    "vanilla", "gspo", "cispo", "sapo", "gpg", "reinforce", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl",
    "dro", *BYPASS,
]  # fmt: skip


def settings(case, mode="token-mean"):
    policy_loss = SimpleNamespace(
        loss_mode=case.split(":")[0], clip_cov_ratio=0.1, clip_cov_lb=0.01, clip_cov_ub=5.0, kl_cov_ratio=0.1,
        ppo_kl_coef=1.0, dro_beta=0.4, rollout_correction=SimpleNamespace(**BYPASS.get(case, {})),
    )  # fmt: skip
    return SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.28, clip_ratio_c=1.6, tau_pos=1.0, tau_neg=1.05,
        loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3+",
        policy_loss=policy_loss,
    )  # fmt: skip


def sample(rows=9, columns=7):
    """(inputs, entropy, reference log-probs); the last row is masked altogether."""
    random = torch.Generator().manual_seed(0)

    def draw(low, high):
        return torch.rand(rows, columns, generator=random, dtype=torch.float64) * (high - low) + low

    old, lengths = draw(-2.0, -0.1), torch.randint(1, columns + 1, (rows, 1), generator=random)
    mask = ((torch.arange(columns) < lengths) & (draw(0, 1) < 0.9)).long()
    mask[-1] = 0
    inputs = LossInputs(
        log_probs=old + draw(-0.5, 0.5),
        old_log_probs=old,
        advantages=draw(-1.5, 1.5),
        mask=mask,
        weights=draw(0.2, 2.0),
        rollout_log_probs=old + draw(-0.3, 0.3),
        rows=torch.arange(rows) * 7 + 3,
    )
    return inputs, draw(0.0, 2.0), old + draw(-0.4, 0.4)


def take(x, rows):
    return LossInputs(**{name: value[rows] for name, value in vars(x).items() if isinstance(value, torch.Tensor)})


def run(case, x, entropy, reference, mode="token-mean", parts=None, denominators=None):
    """Loss, gradient of log-probs and of entropy, and metrics, summed over micro-batches given as row indices."""
    config, loss = settings(case, mode), POLICY_LOSS.get(case.split(":")[0])
    new = x.log_probs.detach().clone().requires_grad_()
    spread = entropy.detach().clone().requires_grad_()
    x = replace(x, log_probs=new)
    x = replace(x, selected=loss.choose(x, config, seed=5, step=2))
    counts = denominators or Denominators.count(x.mask)
    total, metrics = torch.zeros((), dtype=torch.float64), {}
    for rows in parts or [torch.arange(len(x.mask))]:
        share, found = policy_loss_terms(take(x, rows), config, counts, spread[rows], reference[rows])
        total = total + share
        metrics = {name: metrics.get(name, 0) + value for name, value in found.items()}
    return total.detach(), *torch.autograd.grad(total, (new, spread)), metrics


def assert_same(first, second):
    for one, two in zip(first[:3], second[:3], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)
    assert first[3].keys() == second[3].keys()
    for name in first[3]:
        torch.testing.assert_close(first[3][name], second[3][name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES)
def test_micro_batch_size_does_not_change_loss_gradient_or_metrics(case, mode):
    columns = sample()
    whole = run(case, *columns, mode)
    assert whole[1].abs().sum() > 0
    for sizes in ([1] * 9, [4, 5], [2, 3, 3, 1]):
        assert_same(whole, run(case, *columns, mode, parts=torch.arange(9).split(sizes)))


@pytest.mark.parametrize("case", CASES)
def test_row_order_does_not_change_loss_gradient_or_metrics(case):
    x, entropy, reference = sample()
    order = torch.tensor([5, 8, 0, 3, 7, 1, 6, 2, 4])
    whole = run(case, x, entropy, reference)
    turned = run(case, take(x, order), entropy[order], reference[order])
    assert_same((whole[0], whole[1][order], whole[2][order], whole[3]), turned)


@pytest.mark.parametrize("case", CASES)
def test_padding_columns_change_nothing_whatever_stands_in_them(case):
    x, entropy, reference = sample()
    counts = Denominators.count(x.mask)

    def pad(column):
        return torch.nn.functional.pad(column, (0, 3), value=math.nan if column.is_floating_point() else 0)

    wide = {name: pad(c) if c.dim() == 2 else c for name, c in vars(x).items() if isinstance(c, torch.Tensor)}
    whole = run(case, x, entropy, reference, denominators=counts)
    padded = run(case, LossInputs(**wide), pad(entropy), pad(reference), denominators=counts)
    assert (padded[1][:, 7:] == 0).all() and (padded[2][:, 7:] == 0).all()
    assert_same(whole, (padded[0], padded[1][:, :7], padded[2][:, :7], padded[3]))


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES)
def test_a_fully_masked_row_changes_nothing(case, mode):
    x, entropy, reference = sample()
    rows = torch.arange(8)
    whole = run(case, x, entropy, reference, mode)
    without = run(case, take(x, rows), entropy[rows], reference[rows], mode)
    assert (whole[1][8] == 0).all()
    assert_same((whole[0], whole[1][:8], whole[2][:8], whole[3]), without)


@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_without_a_valid_token_adds_nothing(case):
    x, entropy, reference = sample()
    loss, gradient, _, metrics = run(
        case, take(x, [8]), entropy[8:], reference[8:], denominators=Denominators(8, 40, 7)
    )
    assert loss == 0 and (gradient == 0).all() and all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("case", CASES)
def test_masks_may_be_bool_int_or_float_and_inputs_float32(case):
    x, entropy, reference = sample()
    single = {
        name: c.float() if c.is_floating_point() else c for name, c in vars(x).items() if isinstance(c, torch.Tensor)
    }
    whole = run(case, x, entropy, reference)
    for mask in (x.mask.bool(), x.mask.float()):
        found = run(case, LossInputs(**(single | {"mask": mask})), entropy.float(), reference.float())
        torch.testing.assert_close(found[0].float(), whole[0].float(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found[1], whole[1].float(), rtol=1e-3, atol=1e-5)


def test_trap_11_geo_mean_counts_the_whole_mini_batch():
    columns = sample()
    config, x = settings("geo_mean"), columns[0]
    counts = Denominators.count(x.mask)
    halves = [
        policy_loss_terms(take(x, rows), config, counts, None, columns[2][rows])[1] for rows in ([0, 1, 2], [3, 4])
    ]
    rest = policy_loss_terms(take(x, [5, 6, 7, 8]), config, counts, None, columns[2][5:])[1]
    whole = policy_loss_terms(x, config, counts, None, columns[2])[1]["actor/pg_loss"]
    assert sum(part["actor/pg_loss"] for part in (*halves, rest)).item() == pytest.approx(whole.item())
