from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.core.masked import (
    AGGREGATIONS,
    Denominators,
    aggregate,
    group_count,
    group_index,
    group_mean,
    group_std,
    group_sum,
    masked_mean,
    masked_sum,
    whiten,
)
from paddock.errors import UserError

LOSSES = torch.tensor([[1.0, 3.0, 99.0, 99.0], [4.0, 4.0, 4.0, 4.0]])
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 3.333333),
        ("seq-mean-token-sum", 10.0),
        ("seq-mean-token-mean", 3.0),
        ("seq-mean-token-sum-norm", 2.5),
        ("token-sum", 20.0),
    ],
)
def test_aggregation_gives_the_values_worked_by_hand(mode, expected):
    assert float(aggregate(LOSSES, MASK, mode, Denominators.count(MASK))) == pytest.approx(expected, abs=1e-5)


def test_seq_mean_token_sum_norm_divides_by_the_number_of_sequences():
    twice = Denominators.count(torch.cat([MASK, MASK]), length=4)
    doubled = aggregate(torch.cat([LOSSES, LOSSES]), torch.cat([MASK, MASK]), "seq-mean-token-sum-norm", twice)
    assert float(doubled) == pytest.approx(2.5)


def test_an_unknown_mode_is_answered_with_the_closest():
    with pytest.raises(UserError, match="did you mean 'token-mean'"):
        aggregate(LOSSES, MASK, "token_mean", Denominators.count(MASK))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_batch_without_valid_tokens_gives_zero(mode):
    nothing = torch.zeros_like(MASK)
    assert float(aggregate(LOSSES, nothing, mode, Denominators.count(nothing))) == 0.0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_what_stands_outside_the_mask_is_never_read(mode):
    holed = LOSSES.masked_fill(MASK == 0, math.nan).requires_grad_()
    value = aggregate(holed, MASK, mode, Denominators.count(MASK))
    value.backward()
    assert math.isfinite(value.item())
    assert bool((holed.grad[MASK == 0] == 0).all())


def some_batch(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return x, (torch.rand(rows, columns, generator=generator) < 0.6).double()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(2, 9),
    columns=st.integers(1, 7),
    cut=st.integers(1, 8),
    mode=st.sampled_from(AGGREGATIONS),
    seed=st.integers(0, 999),
)
def test_how_a_batch_is_split_does_not_change_its_aggregate(rows, columns, cut, mode, seed):
    x, mask = some_batch(rows, columns, seed)
    shards = [slice(0, min(cut, rows)), slice(min(cut, rows), rows)]
    counts = sum((Denominators.count(mask[shard]) for shard in shards), Denominators(0, 0, 0))
    assert counts == Denominators.count(mask)
    whole = aggregate(x, mask, mode, counts)
    parts = sum(aggregate(x[shard], mask[shard], mode, counts) for shard in shards)
    assert torch.allclose(whole, parts, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(mode=st.sampled_from(AGGREGATIONS), seed=st.integers(0, 999))
def test_neither_row_order_nor_padding_nor_a_masked_row_changes_an_aggregate(mode, seed):
    x, mask = some_batch(4, 5, seed)
    expected = aggregate(x, mask, mode, Denominators.count(mask, length=5))
    x = torch.nn.functional.pad(x, (0, 3, 0, 1), value=7.0)[[4, 2, 0, 1, 3]]
    mask = torch.nn.functional.pad(mask, (0, 3, 0, 1))[[4, 2, 0, 1, 3]]
    assert torch.allclose(expected, aggregate(x, mask, mode, Denominators.count(mask, length=5)), atol=1e-12)


def test_masked_means_and_sums():
    assert masked_sum(LOSSES, MASK).item() == 20
    assert masked_sum(LOSSES, MASK, -1).tolist() == [4, 16]
    assert masked_mean(LOSSES, MASK).item() == pytest.approx(20 / 6)
    assert masked_mean(LOSSES, MASK, -1).tolist() == [2, 4]
    assert masked_mean(LOSSES, torch.zeros_like(MASK), -1).tolist() == [0, 0]


def test_whitening_uses_the_unbiased_variance_of_valid_tokens_and_reaches_every_position():
    x = torch.tensor([[0.82675, 0.765, 0.7, 0.0]])
    white = whiten(x, torch.tensor([[1, 1, 1, 0]]))
    assert white[0, :3].tolist() == pytest.approx([0.991343, 0.017092, -1.008435], abs=1e-5)
    mean, std = statistics.fmean(x[0, :3].tolist()), statistics.stdev(x[0, :3].tolist())
    assert white[0, 3].item() == pytest.approx((0 - mean) / math.sqrt(std**2 + 1e-8), rel=1e-5)


@pytest.mark.parametrize("valid", [0, 1])
def test_whitening_fewer_than_two_tokens_is_an_error(valid):
    mask = torch.zeros(1, 3)
    mask[0, :valid] = 1
    with pytest.raises(UserError, match=f"has {valid}"):
        whiten(torch.rand(1, 3), mask)


def test_group_statistics_match_a_plain_loop_for_any_ids_order_and_size():
    group = torch.tensor([70, -3, 70, 5, -3, 70, 2**40])
    values = torch.tensor([1.0, 2.5, -1.0, 4.0, 0.5, 3.0, 9.0])
    members = [[v for v, h in zip(values.tolist(), group.tolist(), strict=True) if h == g] for g in group.tolist()]
    assert group_index(group)[1] == 4
    assert group_count(group).tolist() == [len(m) for m in members]
    assert group_sum(values, group).tolist() == pytest.approx([sum(m) for m in members])
    assert group_mean(values, group).tolist() == pytest.approx([statistics.fmean(m) for m in members])
    expected = [statistics.stdev(m) if len(m) > 1 else 0.0 for m in members]
    assert group_std(values, group).tolist() == pytest.approx(expected)


def test_equal_values_have_exactly_zero_spread():
    values = torch.full((7,), 0.1)
    group = torch.zeros(7, dtype=torch.long)
    assert bool((values == group_mean(values, group)).all())
    assert bool((group_std(values, group) == 0).all())
