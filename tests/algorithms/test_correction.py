"""Rollout correction against loops in plain Python, and against values worked by hand."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from paddock.algorithms.correction import correct, correction, kept_mask
from paddock.config.rollout_correction import REJECTION_OPTIONS, CorrectionPlan, parse
from paddock.core.batch import Batch

ROLLOUT = [[-0.5, -1.2, -0.3, -2.0, -0.7], [-1.0, -0.2, -0.9, -0.4, -1.5], [-0.8, -0.6, -1.1, -0.1, -0.3], [0.0] * 5]
LOG_RATIO = [[0.1, -0.2, 0.3, 0.0, 0.05], [0.9, 0.0, -1.4, 0.02, 0.6], [-0.7, 0.25, 0.0, 0.4, -0.1], [9.0] * 5]
MASK = [[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 0, 0, 1], [0] * 5]
WIDE_LOG_RATIO = [[30.0, -25.0, 0.3, 0.0, 0.05], [0.9, 0.0, -1.4, 0.02, 0.6], [-70.0, 0.25, 0.0, 0.4, -0.1], [9.0] * 5]


def plan_of(**keys):
    return parse(SimpleNamespace(**keys))


def tensors(log_ratio=LOG_RATIO):
    rollout = torch.tensor(ROLLOUT, dtype=torch.float64)
    return rollout + torch.tensor(log_ratio, dtype=torch.float64), rollout, torch.tensor(MASK)


def clamp(x, low=-20.0, high=20.0):
    return min(max(x, low), high)


def mean(values):
    return sum(values) / len(values) if values else 0.0


def std(values):
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def biased_std(values):
    return math.sqrt(max(0.0, mean([v * v for v in values]) - mean(values) ** 2))


def share(flags):
    return mean([1.0 if flag else 0.0 for flag in flags])


def valid(row, mask):
    return [x for x, m in zip(row, mask, strict=True) if m]


def rows_of(matrix):
    return [valid(row, mask) for row, mask in zip(matrix, MASK, strict=True)]


def slow_off_policy(log_ratio):
    train = [[b + x for b, x in zip(bs, xs, strict=True)] for bs, xs in zip(ROLLOUT, log_ratio, strict=True)]
    a, b = [mean(row) for row in rows_of(train)], [mean(row) for row in rows_of(ROLLOUT)]
    ratios = rows_of(log_ratio)
    flat, sums = [x for row in ratios for x in row], [sum(row) for row in ratios]
    gap = [y - x for x, y in zip(a, b, strict=True)]
    return {
        "training_ppl": mean([math.exp(-x) for x in a]),
        "training_log_ppl": mean([-x for x in a]),
        "rollout_ppl": mean([math.exp(-x) for x in b]),
        "rollout_log_ppl": mean([-x for x in b]),
        "log_ppl_diff": mean(gap),
        "log_ppl_abs_diff": mean([abs(x) for x in gap]),
        "log_ppl_diff_max": max(gap),
        "log_ppl_diff_min": min(gap),
        "ppl_ratio": mean([math.exp(x) for x in gap]),
        "kl": mean([-x for x in flat]),
        "k3_kl": mean([math.exp(x) - x - 1 for x in flat]),
        "chi2_token": mean([math.exp(2 * clamp(x)) for x in flat]) - 1,
        "chi2_seq": mean([math.exp(2 * clamp(s)) for s in sums]) - 1,
    }


def slow_weights(log_ratio, level, low, high, normalise):
    """Per row: v of its valid tokens, w of them, and w after normalisation; then the factor."""
    v = []
    for row in rows_of(log_ratio):
        v.append([math.exp(clamp(x)) if level == "token" else math.exp(clamp(sum(row))) for x in row])
    w = [[(x if low <= x <= high else 0.0) if low is not None else min(x, high) for x in row] for row in v]
    factor = 1.0
    if normalise:
        factor = mean([x for row in w for x in row]) if level == "token" else mean([mean(row) for row in w if row])
        factor = factor if factor > 1e-8 else 1.0
    return v, w, [[x / factor for x in row] for row in w], factor


def slow_weight_metrics(log_ratio, level, low, high, v, w):
    flat_v, flat_w = [x for row in v for x in row], [x for row in w for x in row]
    sums = [sum(row) for row in rows_of(log_ratio)]
    floor = 1 / high if low is None else low
    q, qv = [mean(row) for row in w], [mean(row) for row in v]
    ess = mean([(x / (mean(flat_w) + 1e-8)) ** 2 for x in flat_w])
    out = {
        "mean": mean(flat_w),
        "std": biased_std(flat_w),
        "eff_sample_size": 1 / ess if ess else 0.0,
        "seq_mean": mean(q),
        "seq_std": std(q),
        "seq_max": max(q),
        "seq_min": min(q),
        "seq_max_deviation": max(abs(x - 1) for x in q),
        "seq_fraction_high": share(x > high for x in qv),
        "seq_fraction_low": share(x < floor for x in qv),
    }
    if level == "token":
        out |= {"max": max(flat_w), "min": min(flat_w)}
        out |= {"ratio_fraction_high": share(x > high for x in flat_v)}
        out |= {"ratio_fraction_low": share(x < floor for x in flat_v)}
    else:
        out |= {"max": math.exp(min(max(sums), 20)), "min": math.exp(min(sums))}
        out |= {"ratio_fraction_high": share(s > math.log(high) for s in sums)}
        out |= {"ratio_fraction_low": share(s < math.log(floor) for s in sums)}
    if low is not None:
        out["oob_ratio"] = share(x < low or x > high for x in flat_v)
    return out


def slow_rejection(log_ratio, option, low, high):
    """Per row: does each valid token stay; then the option's metrics. Bounds in the statistic's unit."""
    level, kind = option.rsplit("_", 1)
    k = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    tokens = [[k(clamp(x)) for x in row] for row in rows_of(log_ratio)]
    reduce = {"token": mean, "seq_mean": mean, "seq_sum": sum, "seq_max": lambda row: max(row, default=0.0)}[level]
    q = [reduce(row) for row in tokens]
    x = tokens if level == "token" else [[q[i]] * len(row) for i, row in enumerate(tokens)]
    keep = [[value <= high and (low is None or value >= low) for value in row] for row in x]
    flat = [value for row in x for value in row]
    full = [value for value, row in zip(q, tokens, strict=True) if row]
    spot = flat if level == "token" else full
    hat = [min(max(value, 0.0 if low is None else low), high) for value in flat]
    out = {
        "mean": mean(flat),
        "std": biased_std(hat),
        "max": max(spot),
        "min": min(spot),
        "fraction_high": share(value > high for value in spot),
        "fraction_low": share(low is not None and value < low for value in spot),
        "seq_mean": mean(full),
        "seq_std": std(full),
        "seq_max": max(full),
        "seq_min": min(full),
        "seq_max_deviation": max(abs(value) for value in full),
        "seq_fraction_high": share(value > high for value in full),
        "masked_fraction": share(not kept for row in keep for kept in row),
        "seq_masked_fraction": share(not all(row) for row in keep if row),
    }
    if low is not None:
        out["seq_fraction_low"] = share(value < low for value in full)
    return keep, out


def assert_metrics(found, expected, prefix):
    mine = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        assert mine[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("log_ratio", [LOG_RATIO, WIDE_LOG_RATIO], ids=["near", "beyond the clamps"])
def test_off_policy_metrics_match_a_slow_loop(log_ratio):
    found = correction(*tensors(log_ratio), CorrectionPlan())
    assert found.weights is None
    assert torch.equal(found.mask, torch.tensor(MASK))
    assert_metrics(found.metrics, slow_off_policy(log_ratio), "rollout_corr/")


@pytest.mark.parametrize("log_ratio", [LOG_RATIO, WIDE_LOG_RATIO], ids=["near", "beyond the clamps"])
@pytest.mark.parametrize(
    "level,threshold,normalise", list(product(["token", "sequence"], [2.0, "1.2", "0.6_1.5"], [False, True]))
)
def test_importance_weights_and_their_metrics_match_a_slow_loop(log_ratio, level, threshold, normalise):
    found = correction(
        *tensors(log_ratio),
        plan_of(rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalise),
    )
    low, high = (0.6, 1.5) if threshold == "0.6_1.5" else (None, float(threshold))
    v, w, final, factor = slow_weights(log_ratio, level, low, high, normalise)
    expected = slow_weight_metrics(log_ratio, level, low, high, v, w)
    assert_metrics(
        found.metrics, expected | ({"batch_norm_factor": factor} if normalise else {}), "rollout_corr/rollout_is_"
    )
    mask = torch.tensor(MASK) != 0
    flat = torch.tensor([x for row in final for x in row], dtype=torch.float64)
    torch.testing.assert_close(found.weights[mask], flat, rtol=1e-6, atol=1e-9)
    assert (found.weights[~mask] == 0).all()
    assert torch.equal(found.mask, torch.tensor(MASK))


@pytest.mark.parametrize("log_ratio", [LOG_RATIO, WIDE_LOG_RATIO], ids=["near", "beyond the clamps"])
@pytest.mark.parametrize("option", REJECTION_OPTIONS)
def test_rejection_and_its_metrics_match_a_slow_loop(log_ratio, option):
    is_k1 = option.endswith("k1")
    found = correction(
        *tensors(log_ratio), plan_of(rollout_rs=option, rollout_rs_threshold="0.85_1.15" if is_k1 else 0.12)
    )
    low, high = (math.log(0.85), math.log(1.15)) if is_k1 else (None, 0.12)
    keep, expected = slow_rejection(log_ratio, option, low, high)
    assert_metrics(found.metrics, expected, f"rollout_corr/rollout_rs_{option}_")
    mask = torch.tensor(MASK)
    assert found.mask[mask != 0].tolist() == [int(kept) for row in keep for kept in row]
    assert (found.mask[mask == 0] == 0).all()
    assert found.mask.dtype == mask.dtype
    if log_ratio is LOG_RATIO:
        assert 0 < int(found.mask.sum()) < int(mask.sum()), "the thresholds cut between the samples"
    total = {"masked_fraction": expected["masked_fraction"], "seq_masked_fraction": share(not all(r) for r in keep)}
    for name, value in total.items():
        assert found.metrics[f"rollout_corr/rollout_rs_{name}"] == pytest.approx(value)


def test_a_token_stays_only_if_every_option_keeps_it():
    train, rollout, mask = tensors()
    names, bounds = "token_k1,seq_mean_k3, token_k1,seq_max_k2", "1.3,0.3,0.5"
    both = correction(train, rollout, mask, plan_of(rollout_rs=names, rollout_rs_threshold=bounds))
    single = [
        correction(train, rollout, mask, plan_of(rollout_rs=name, rollout_rs_threshold=bound)).mask
        for name, bound in zip(("token_k1", "seq_mean_k3", "seq_max_k2"), bounds.split(","), strict=True)
    ]
    assert torch.equal(both.mask, single[0] * single[1] * single[2])
    lost = (mask != 0) & (both.mask == 0)
    assert both.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(float(lost.sum() / mask.sum()))
    assert both.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(float(lost.any(-1).sum() / 4))


def test_trap_9_a_k1_band_bounds_rollout_over_train_so_an_asymmetric_band_reads_upside_down():
    ratios = torch.tensor([[0.5, 0.82, 0.84, 1.0, 2.0, 9.9, 10.1]], dtype=torch.float64)
    mask = torch.ones_like(ratios)
    plan = plan_of(rollout_rs="token_k1", rollout_rs_threshold="0.1_1.2")
    assert kept_mask(ratios.log(), mask, plan.rejections).tolist() == [[0, 0, 1, 1, 1, 1, 0]]


def test_bounds_are_inclusive():
    plan = plan_of(rollout_rs="token_k1", rollout_rs_threshold="2.0")
    edge = torch.tensor([[math.log(2.0), -math.log(2.0)]], dtype=torch.float64)
    assert kept_mask(edge, torch.ones_like(edge), plan.rejections).tolist() == [[1, 1]]


def test_golden_values():
    log_ratio = torch.tensor([[0.1, -0.2, 0.3], [0.9, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    rollout = torch.full_like(log_ratio, -1.0)
    token = correction(rollout + log_ratio, rollout, mask, plan_of(rollout_is="token"))
    expected = [[1.105171, 0.818731, 1.349859], [2.0, 1.0, 0.0]]
    torch.testing.assert_close(token.weights, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    row = correction(rollout + log_ratio, rollout, mask, plan_of(rollout_is="sequence"))
    torch.testing.assert_close(row.weights[:, 0], torch.tensor([1.221403, 2.0]), rtol=1e-5, atol=1e-6)
    golden = {"kl": -0.22, "k3_kl": 0.126673, "chi2_token": 1.152698, "chi2_seq": 2.770736, "ppl_ratio": 0.786568}
    for name, value in golden.items():
        assert token.metrics[f"rollout_corr/{name}"] == pytest.approx(value, abs=2e-6)
    assert token.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.903392, abs=2e-6)


def test_weights_that_all_fall_outside_the_band_have_no_effective_sample_size():
    train, rollout, mask = tensors([[3.0] * 5] * 4)
    found = correction(
        train,
        rollout,
        mask,
        plan_of(rollout_is="token", rollout_is_threshold="0.5_5.0", rollout_is_batch_normalize=True),
    )
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1
    assert (found.weights == 0).all()
    assert torch.equal(found.mask, mask)


def test_padding_columns_and_empty_rows_change_neither_weights_nor_masks():
    plan = plan_of(
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs="seq_mean_k1,token_k3",
        rollout_rs_threshold="1.5,0.3",
    )
    columns = tensors()
    found = correction(*columns, plan)
    padded = [
        torch.nn.functional.pad(x, (0, 3, 0, 2), value=0 if i == 2 else float("nan")) for i, x in enumerate(columns)
    ]
    wide = correction(*padded, plan)
    torch.testing.assert_close(wide.weights[:4, :5], found.weights)
    assert (wide.weights[:, 5:] == 0).all() and (wide.weights[4:] == 0).all()
    assert torch.equal(wide.mask[:4, :5], found.mask) and int(wide.mask.sum()) == int(found.mask.sum())
    assert all(math.isfinite(value) for value in wide.metrics.values())


def test_row_order_changes_nothing():
    plan = plan_of(rollout_is="token", rollout_rs="seq_max_k2", rollout_rs_threshold=0.3)
    columns, order = tensors(), torch.tensor([2, 0, 3, 1])
    found, turned = correction(*columns, plan), correction(*(column[order] for column in columns), plan)
    torch.testing.assert_close(turned.weights, found.weights[order])
    assert torch.equal(turned.mask, found.mask[order])
    assert turned.metrics == pytest.approx(found.metrics)


def test_a_batch_without_a_valid_token_passes_through():
    train, rollout, mask = tensors()
    found = correction(
        train, rollout, mask * 0, plan_of(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=1)
    )
    assert found.metrics == {} and (found.weights == 0).all() and (found.mask == 0).all()


def test_correction_fills_weights_shrinks_the_mask_and_leaves_rewards_alone():
    train, rollout, mask = tensors()
    rewards = torch.zeros_like(train)
    rewards[torch.arange(3), torch.tensor([2, 4, 4])] = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    batch = Batch(
        row=torch.arange(4),
        group=torch.tensor([0, 0, 1, 1]),
        prompts=torch.zeros(4, 2, dtype=torch.long),
        mask=mask,
        old_log_probs=train.requires_grad_(),
        rollout_log_probs=rollout,
        scores=rewards,
        rewards=rewards,
    )
    corrected, metrics = correct(batch, plan_of(rollout_is="token", rollout_rs="seq_mean_k2", rollout_rs_threshold=0.1))
    assert corrected.mask.sum() < mask.sum()
    assert torch.equal(corrected.rewards, rewards) and torch.equal(corrected.scores, rewards)
    assert not corrected.weights.requires_grad
    assert batch.weights is None and torch.equal(batch.mask, mask)
    assert all(isinstance(value, float) for value in metrics.values())


def test_an_idle_plan_gives_metrics_only():
    train, rollout, mask = tensors()
    batch = Batch(
        row=torch.arange(4), group=torch.arange(4), prompts=torch.zeros(4, 1), mask=mask,
        old_log_probs=train, rollout_log_probs=rollout,
    )  # fmt: skip
    corrected, metrics = correct(batch, CorrectionPlan())
    assert corrected.weights is None and torch.equal(corrected.mask, mask) and len(metrics) == 13


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_beyond_exp_20_is_held_there(level):
    train, rollout, mask = tensors(WIDE_LOG_RATIO)
    found = correction(train, rollout, mask, plan_of(rollout_is=level, rollout_is_threshold=1e12))
    assert found.weights.max().item() == pytest.approx(math.exp(20) if level == "token" else math.exp(5.3))
    assert found.weights[mask != 0].min().item() == pytest.approx(math.exp(-20))
