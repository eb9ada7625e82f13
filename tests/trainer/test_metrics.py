from __future__ import annotations

import math

import pytest
import torch

from paddock.core.batch import Batch
from paddock.trainer import metrics


def batch(**columns) -> Batch:
    """Three rows: lengths 3, 2 and 0 (aborted); the second has one token that a tool wrote."""
    base = {
        "row": torch.arange(3),
        "group": torch.tensor([7, 7, 9]),
        "prompts": torch.zeros(3, 4, dtype=torch.long),
        "prompt_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]),
        "responses": torch.zeros(3, 3, dtype=torch.long),
        "mask": torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        "lengths": torch.tensor([3, 2, 0]),
        "scores": torch.tensor([[0, 0, 1.0], [-2.0, 0, 0], [0, 0, 0]]),
        "rewards": torch.tensor([[0, 0, 0.5], [-2.5, 0, 0], [0, 0, 0]]),
        "advantages": torch.tensor([[1.0, 2, 3], [-6, 99, 99], [99, 99, 99]]),
        "returns": torch.tensor([[1.0, 2, 3], [2, 99, 99], [99, 99, 99]]),
    }
    return Batch(**(base | columns))


def test_batch_metrics_carry_the_known_names_and_values_worked_by_hand():
    found = metrics.batch_metrics(batch(), max_prompt=4, max_response=3, use_critic=False)
    assert found == {
        "critic/score/mean": -0.5, "critic/score/max": 1.0, "critic/score/min": -2.0,
        "reward/std": math.sqrt(4.5),  # of 1 and -2: (1.5^2 + 1.5^2) / (2 - 1)
        "critic/rewards/mean": -1.0, "critic/rewards/max": 0.5, "critic/rewards/min": -2.5,
        "critic/advantages/mean": 0.0, "critic/advantages/max": 3.0, "critic/advantages/min": -6.0,
        "critic/returns/mean": 2.0, "critic/returns/max": 3.0, "critic/returns/min": 1.0,
        "response_length/mean": 5 / 3, "response_length/max": 3.0, "response_length/min": 0.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 2.5, "response_length_non_aborted/max": 3.0,
        "response_length_non_aborted/min": 2.0, "response_length_non_aborted/clip_ratio": 0.5,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 8 / 3, "prompt_length/max": 4.0, "prompt_length/min": 1.0,
        "prompt_length/clip_ratio": 1 / 3,
    }  # fmt: skip


def test_explained_variance_compares_the_error_with_the_returns():
    values = torch.tensor([[1.5, 1.5, 2.5], [2.5, 99, 99], [99, 99, 99]])  # errors -.5 .5 .5 -.5: variance 1/3
    found = metrics.batch_metrics(batch(values=values), 4, 3, use_critic=True)
    assert found["critic/values/mean"] == 2.0
    assert found["critic/vf_explained_var"] == pytest.approx(1 - (1 / 3) / (2 / 3 + 1e-5), abs=1e-9)


def test_the_ages_of_tokens_by_hand():
    """Weights of version 9 learn from tokens of versions 7, 8, 8 and 9; a tool's token has no version."""
    versions = torch.tensor([[7, 8, 8], [9, -1, -1], [-1, -1, -1]])
    found = metrics.age_metrics(batch(versions=versions), version=9, staleness=3)
    name = "training/off_policy/"
    assert [found[f"{name}token_staleness_share/{age}"] for age in range(4)] == [0.25, 0.5, 0.25, 0.0]
    for kind, values in (("spans", (1.5, 2, 1)), ("staleness", (0.5, 1, 0)), ("staleness_worst", (1, 2, 0))):
        assert tuple(found[f"{name}trajectory_{kind}/{part}"] for part in ("mean", "max", "min")) == values
    nothing = metrics.age_metrics(batch(versions=versions, mask=torch.zeros(3, 3)), version=9, staleness=1)
    assert [nothing[f"{name}token_staleness_share/{age}"] for age in range(2)] == [0.0, 0.0]


def test_what_lies_outside_the_mask_is_never_read():
    poisoned = batch().advantages.masked_fill(batch().mask == 0, math.nan)
    clean, dirty = (metrics.batch_metrics(batch(advantages=a), 4, 3, False) for a in (batch().advantages, poisoned))
    assert clean == dirty


def test_a_batch_in_which_nothing_counts_gives_zeros_and_says_so():
    nothing = batch(mask=torch.zeros(3, 3), lengths=torch.zeros(3))
    found = metrics.batch_metrics(nothing, 4, 3, use_critic=False)
    assert found["response/aborted_ratio"] == 1.0
    assert found["critic/score/mean"] == found["critic/advantages/max"] == found["critic/returns/min"] == 0.0


def test_a_column_that_is_missing_is_named():
    with pytest.raises(ValueError, match="no 'values'"):
        metrics.batch_metrics(batch(), 4, 3, use_critic=True)


def test_rollout_and_trainer_probabilities_are_compared_on_the_mask():
    p = torch.tensor([[0.2, 0.4, 0.6], [0.8, 1, 1], [1, 1, 1]])
    q = torch.tensor([[0.2, 0.5, 0.6], [0.7, 0.1, 0.1], [0.1, 0.1, 0.1]])
    found = metrics.batch_metrics(batch(old_log_probs=p.log(), rollout_log_probs=q.log()), 4, 3, False)
    pairs = torch.tensor([[0.2, 0.4, 0.6, 0.8], [0.2, 0.5, 0.6, 0.7]])
    assert found["training/rollout_probs_diff_valid"] == 1.0
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.05)
    assert found["training/rollout_probs_diff_std"] == pytest.approx(math.sqrt(0.01 / 3))
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(torch.corrcoef(pairs)[0, 1].item())


@pytest.mark.parametrize(("other", "correlation"), [(0.5, 1.0), (0.25, 0.0)])
def test_constant_probabilities_correlate_only_where_they_agree(other, correlation):
    p, q = torch.full((3, 3), 0.5), torch.full((3, 3), other)
    found = metrics.batch_metrics(batch(old_log_probs=p.log(), rollout_log_probs=q.log()), 4, 3, False)
    assert found["training/rollout_actor_probs_pearson_corr"] == correlation


def test_turns_and_tool_calls_are_counted_where_the_rows_carry_them():
    found = metrics.batch_metrics(batch(extras={"num_turns": [1, 2, 6]}), 4, 3, False)
    assert (found["num_turns/min"], found["num_turns/max"], found["num_turns/mean"]) == (1.0, 6.0, 3.0)
    assert not any(name.startswith("tool_call_counts") for name in found)
