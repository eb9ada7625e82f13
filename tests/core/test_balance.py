from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.core.balance import (
    balanced_order,
    karmarkar_karp,
    needed_micro_batches,
    token_budget_micro_batches,
    workload,
)
from paddock.errors import UserError


def totals(parts, weights):
    return [sum(weights[i] for i in part) for part in parts]


def flat(parts):
    return sorted(itertools.chain.from_iterable(parts))


def test_workload_is_linear_plus_attention():
    assert workload(100) == 24576 * 100 + 100 * 100


def test_karmarkar_karp_gives_the_textbook_difference():
    parts = karmarkar_karp([4, 5, 6, 7, 8], 2, equal_size=False)
    assert sorted(totals(parts, [4, 5, 6, 7, 8])) == [14, 16]


def test_equal_size_parts_follow_the_runs_of_sorted_items():
    weights = [1, 2, 4, 8]  # runs (1,2) and (4,8): the heavy of one joins the light of the other
    assert sorted(karmarkar_karp(weights, 2, equal_size=True)) == [[0, 3], [1, 2]]


def test_equal_size_refuses_a_remainder():
    with pytest.raises(ValueError, match="equal size"):
        karmarkar_karp([1, 2, 3], 2, equal_size=True)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=40), k=st.integers(1, 8))
def test_every_rank_gets_as_many_rows_as_the_others_give_or_take_one(lengths, k):
    parts = balanced_order(lengths, k)
    assert len(parts) == k and flat(parts) == list(range(len(lengths)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= (len(lengths) % k != 0)


def test_ranks_get_nearly_equal_work_where_plain_order_does_not():
    draw = random.Random(0)
    lengths = [int(draw.paretovariate(1.2) * 200) % 8192 + 1 for _ in range(512)]
    works = [workload(length) for length in lengths]
    balanced = totals(balanced_order(lengths, 8), works)
    plain = [sum(works[i : i + 64]) for i in range(0, 512, 64)]
    assert max(balanced) / min(balanced) < 1.02
    assert max(plain) / min(plain) > 1.2


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    budget=st.integers(100, 400),
    more=st.integers(0, 12),
)
def test_any_count_from_the_needed_one_on_meets_the_token_budget(lengths, budget, more):
    needed = needed_micro_batches(lengths, budget)
    assert needed >= sum(lengths) / budget
    parts = token_budget_micro_batches(lengths, budget, count=needed + more)
    assert len(parts) == needed + more
    assert flat(parts) == list(range(len(lengths)))
    assert max(totals(parts, lengths)) <= budget
    assert all(parts) or needed + more > len(lengths)


def test_a_tight_packing_is_found_where_balancing_the_work_alone_fails():
    lengths = [60, 50, 40, 30, 20]
    parts = token_budget_micro_batches(lengths, 100)
    assert len(parts) == 2 and totals(parts, lengths) == [100, 100]
    lengths = [7, 7, 6, 6, 6, 5, 5]
    assert max(totals(token_budget_micro_batches(lengths, 18), lengths)) <= 18


def test_at_least_the_asked_number_of_micro_batches():
    assert len(token_budget_micro_batches([5, 5, 5, 5], 100, count=3)) == 3


def test_a_sequence_longer_than_the_budget_names_key_value_and_fix():
    with pytest.raises(UserError) as caught:
        token_budget_micro_batches([10, 5000], 4096)
    assert caught.value.key == "ppo_max_token_len_per_gpu" and caught.value.value == 4096
    assert "5000" in caught.value.reason and "5000 or more" in caught.value.fix


def test_too_small_a_count_is_a_programming_error():
    with pytest.raises(ValueError, match="needs 2"):
        token_budget_micro_batches([60, 60], 100, count=1)
