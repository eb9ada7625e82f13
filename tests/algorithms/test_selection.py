from __future__ import annotations

import pytest
import torch

from paddock.algorithms.selection import (
    GroupBuffer,
    group_metric,
    informative_groups,
    overlong_penalty,
    resample,
    resampling_weights,
)
from paddock.config.schema import PFPPOConfig
from paddock.core.batch import Batch
from paddock.errors import UserError


def make(group: list[int], scores: list[float], first_row: int = 0) -> Batch:
    rows = len(group)
    return Batch(
        row=torch.arange(rows) + first_row,
        group=torch.tensor(group),
        prompts=torch.zeros(rows, 1),
        mask=torch.ones(rows, 2),
        scores=torch.tensor([[0.0, score] for score in scores]),
        extras={"acc": scores},
    )


def test_groups_whose_responses_all_fare_alike_are_dropped():
    batch = make([4, 9, 4, 9, 7, 9, 2, 2], [1, 0.1, 0, 0.1, 5, 0.1, -1, 1])
    kept = informative_groups(batch, group_metric(batch, "acc"))
    assert kept.tolist() == [True, False, True, False, True, False, True, True]


def test_the_metric_is_a_sum_of_scores_or_rewards_or_an_extra():
    batch = make([0, 0], [3, 4])
    batch = batch.with_(rewards=batch.need("scores") - 0.5)
    assert group_metric(batch, "seq_reward").tolist() == [3, 4]
    assert group_metric(batch, "seq_final_reward").tolist() == [2, 3]
    assert group_metric(batch, "acc").tolist() == [3, 4]
    with pytest.raises(UserError, match="did you mean 'acc'"):
        group_metric(batch, "accc")


def fill(buffer: GroupBuffer, batch: Batch) -> None:
    buffer.add(batch, group_metric(batch, "seq_reward"))


def test_rounds_of_generation_fill_the_batch_with_exactly_the_needed_groups():
    buffer = GroupBuffer(needed=3, max_rounds=0)
    fill(buffer, make([0, 0, 1, 1], [1, 1, 0, 1]))
    assert not buffer.full
    fill(buffer, make([2, 3, 4, 2, 3, 4], [0, 0, 0, 1, 2, 3], first_row=4))
    assert buffer.full and buffer.rounds == 2
    batch = buffer.take()
    assert batch.group.tolist() == [1, 1, 2, 3, 2, 3]
    assert batch.row.tolist() == [2, 3, 4, 5, 7, 8]


def test_too_few_informative_groups_after_the_last_round_is_an_error_with_a_fix():
    buffer = GroupBuffer(needed=2, max_rounds=2)
    fill(buffer, make([0, 0], [1, 1]))
    with pytest.raises(UserError) as caught:
        fill(buffer, make([1, 1], [0, 1]))
    assert caught.value.key == "algorithm.filter_groups.max_num_gen_batches" and caught.value.value == 2
    assert "1 of 2" in caught.value.reason and "raise it" in caught.value.fix


def test_the_last_round_may_be_the_one_that_suffices():
    buffer = GroupBuffer(needed=1, max_rounds=1)
    fill(buffer, make([0, 0], [1, 2]))
    assert buffer.full


def test_a_group_cannot_arrive_twice():
    buffer = GroupBuffer(needed=5, max_rounds=0)
    fill(buffer, make([0, 0], [1, 2]))
    with pytest.raises(ValueError, match="comes back"):
        fill(buffer, make([0, 0], [1, 2]))


def test_the_overlong_penalty_grows_through_the_buffer():
    lengths = torch.tensor([10, 80, 90, 100])
    assert overlong_penalty(lengths, longest=100, buffer=20, factor=2.0).tolist() == [0, 0, -1, -2]
    with pytest.raises(UserError, match=r"overlong_buffer\.len=0"):
        overlong_penalty(lengths, longest=100, buffer=0, factor=1.0)


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pow", [4, 0, 1, 9, 9]), ("max_min", [1, 0, 0, 1, 1]), ("max_random", [0.1, 0.1, 0.1, 0.4, 0.4])],
)
def test_resampling_weights(method, expected):
    scores = torch.tensor([-2.0, 0, 1, 3, 3])
    assert resampling_weights(scores, method, 2.0).tolist() == pytest.approx(expected)


def test_an_unknown_method_is_answered_with_the_closest():
    with pytest.raises(UserError, match="did you mean 'max_min'"):
        resampling_weights(torch.ones(2), "maxmin", 2.0)


def test_rows_are_drawn_in_proportion_to_their_weight():
    batch = make([0, 1, 2, 3] * 2500, [0, 1, 2, 3] * 2500)
    drawn = resample(batch, PFPPOConfig(), seed=1, step=5)
    assert len(drawn) == len(batch) == len(set(drawn.row.tolist()))
    shares = torch.bincount(drawn.group, minlength=4) / len(drawn)
    assert torch.allclose(shares, torch.tensor([0, 1, 4, 9]) / 14, atol=0.015)


def test_a_draw_depends_on_seed_and_step_but_not_on_the_order_of_rows():
    batch = make(list(range(50)), [float(i % 7) for i in range(50)])
    first = resample(batch, PFPPOConfig(), seed=1, step=5)
    again = resample(batch.rows(torch.randperm(50)), PFPPOConfig(), seed=1, step=5)
    assert torch.equal(first.group, again.group)
    assert not torch.equal(first.group, resample(batch, PFPPOConfig(), seed=1, step=6).group)
    assert not torch.equal(first.group, resample(batch, PFPPOConfig(), seed=2, step=5).group)


def test_all_scores_zero_draws_evenly_instead_of_failing():
    drawn = resample(make(list(range(100)), [0.0] * 100), PFPPOConfig(), seed=0, step=0)
    assert len(set(drawn.group.tolist())) > 50
