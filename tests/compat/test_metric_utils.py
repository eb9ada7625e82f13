"""verl's names for a step's metrics reach Paddock's numbers."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from paddock.errors import UserError
from paddock.runs.samples import Sample
from paddock.trainer.metrics import batch_metrics
from paddock.trainer.validation import variable_metrics

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
utils, protocol = import_module("verl.trainer.ppo.metric_utils"), import_module("verl.protocol")


def proto(**columns):
    """Prompts of 3, 4 and 1 tokens; responses of 3, 2 (one token a tool's) and 0."""
    tensors = {
        "responses": torch.zeros(3, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        "token_level_scores": torch.tensor([[0, 0, 1.0], [-2.0, 0, 0], [0, 0, 0]]),
        "token_level_rewards": torch.tensor([[0, 0, 0.5], [-2.5, 0, 0], [0, 0, 0]]),
        "advantages": torch.tensor([[1.0, 2, 3], [-6, 99, 99], [99, 99, 99]]),
        "returns": torch.tensor([[1.0, 2, 3], [2, 99, 99], [99, 99, 99]]),
        "values": torch.tensor([[1.5, 1.5, 2.5], [2.5, 99, 99], [99, 99, 99]]),
    }
    objects = {"__num_turns__": [2, 4, 2], "tool_call_counts": [0, 3, 0]}
    return protocol.DataProto.from_dict(tensors | columns, objects, {"global_token_num": [6, 6, 1]})


def test_data_metrics_have_the_values_worked_by_hand():
    found = utils.compute_data_metrics(proto())
    expected = {
        "critic/score/mean": -0.5, "critic/score/max": 1.0, "critic/score/min": -2.0,
        "reward/std": 4.5**0.5,
        "critic/rewards/mean": -1.0, "critic/rewards/max": 0.5, "critic/rewards/min": -2.5,
        "critic/advantages/mean": 0.0, "critic/advantages/max": 3.0, "critic/advantages/min": -6.0,
        "critic/returns/mean": 2.0, "critic/returns/max": 3.0, "critic/returns/min": 1.0,
        "critic/values/mean": 2.0, "critic/values/max": 2.5, "critic/values/min": 1.5,
        "critic/vf_explained_var": 1 - (1 / 3) / (2 / 3 + 1e-5),
        "response_length/mean": 5 / 3, "response_length/max": 3.0, "response_length/min": 0.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_non_aborted/mean": 2.5, "response_length_non_aborted/max": 3.0,
        "response_length_non_aborted/min": 2.0, "response_length_non_aborted/clip_ratio": 0.5,
        "response/aborted_ratio": 1 / 3,
        "prompt_length/mean": 8 / 3, "prompt_length/max": 4.0, "prompt_length/min": 1.0,
        "prompt_length/clip_ratio": 1 / 3,
        "num_turns/min": 2.0, "num_turns/max": 4.0, "num_turns/mean": 8 / 3,
        "tool_call_counts/min": 0.0, "tool_call_counts/max": 3.0, "tool_call_counts/mean": 1.0,
    }  # fmt: skip
    assert found == pytest.approx(expected)


def test_data_metrics_are_paddocks_with_and_without_a_critic():
    data = proto(rollout_log_probs=torch.zeros(3, 3), old_log_probs=torch.zeros(3, 3))
    plain = utils.compute_data_metrics(data, use_critic=False)
    rows = protocol.to_batch(data).with_(rollout_log_probs=None)
    assert plain == batch_metrics(rows, max_prompt=4, max_response=3, use_critic=False)
    assert not [name for name in plain if "values" in name or "explained" in name or name.startswith("training/")]


def test_generation_is_timed_by_response_tokens_and_the_rest_by_all():
    found = utils.compute_timing_metrics(proto(), {"gen": 2.0, "ref": 0.5, "step": 3.0, "agent_loop/slowest": 1.0})
    assert found == pytest.approx(
        {
            "timing_s/gen": 2.0,
            "timing_s/ref": 0.5,
            "timing_s/step": 3.0,
            "timing_s/agent_loop/slowest": 1.0,
            "timing_per_token_ms/gen": 2000 / 5,
            "timing_per_token_ms/ref": 500 / 13,
        }
    )


def test_throughput_is_per_device():
    found = utils.compute_throughout_metrics(proto(), {"step": 2.0}, n_gpus=4)
    assert found == {"perf/total_num_tokens": 13.0, "perf/time_per_step": 2.0, "perf/throughput": 13 / 8}


def test_variance_proxies_split_power_into_signal_and_noise():
    assert utils.compute_variance_proxy_metrics(proto(), 0.3) == {}
    data = proto(old_log_probs=torch.full((3, 3), 0.5).log(), sum_pi_squared=torch.full((3, 3), 0.5))
    found = utils.compute_variance_proxy_metrics(data, gradient_norm=2.0)
    # W = 0.5 a token: 1.5, 0.5, 0; A = 2, -6, 0; A^2 W = 6, 18, 0
    assert found == pytest.approx(
        {
            "variance_proxy/proxy1_signal_strength": 4.0,
            "variance_proxy/proxy2_total_power": 8.0,
            "variance_proxy/proxy3_pure_noise": 2.0,
            "variance_proxy/expected_a_squared": 40 / 3,
            "variance_proxy/expected_w": 2 / 3,
        }
    )
    unknown = utils.compute_variance_proxy_metrics(data)
    names = {"variance_proxy/proxy1_signal_strength": 0.0, "variance_proxy/proxy3_pure_noise": 0.0}
    assert unknown == found | names
    weighted = protocol.DataProto.from_dict({**data.batch, "rollout_is_weights": torch.full((3, 3), 2.0)})
    assert utils.compute_variance_proxy_metrics(weighted, 2.0)["variance_proxy/proxy2_total_power"] == 32.0


def test_trap_12_a_reduction_follows_words_of_the_name_and_no_part_of_one():
    values = [1.0, 4.0, 4.0]
    largest = ("critic/score/max", "perf/max_memory_allocated_gb", "rollout_corr/rollout_is_seq_max_deviation")
    smallest = ("num_turns/min", "rollout_corr/log_ppl_diff_min")
    means = (
        "actor/pg_loss", "reward/admin_rate", "perf/minutes", "actor/softmax_scale", "max_margin/loss",
        "critic/minmax_gap", "rollout_corr/rollout_rs_seq_max_k2_mean", "rollout_corr/rollout_rs_seq_max_k3_std",
        "rollout_corr/rollout_rs_seq_max_k2_masked_fraction",
    )  # fmt: skip
    found = utils.reduce_metrics(dict.fromkeys((*largest, *smallest, *means), values))
    assert {found[name] for name in largest} == {4.0} and {found[name] for name in smallest} == {1.0}
    assert {found[name] for name in means} == {3.0}


def test_bootstrap_draws_as_numpys_seeded_generator_does_and_leaves_it_alone():
    data, draws = [0.0, 1.0, 0.5], np.random.RandomState(7).choice(3, size=(50, 2), replace=True)
    np.random.seed(1)
    found = utils.bootstrap_metric(data, 2, [np.max, np.mean], n_bootstrap=50, seed=7)
    after = np.random.random()
    np.random.seed(1)
    assert after == np.random.random()
    best, average = np.array(data)[draws].max(1), np.array(data)[draws].mean(1)
    assert found == [(pytest.approx(x.mean()), pytest.approx(x.std())) for x in (best, average)]


def test_the_majority_is_the_first_value_of_the_most_frequent_vote():
    rows = [{"pred": p, "val": v} for p, v in [("B", 0.1), ("A", 0.9), ("B", 0.8), ("A", 0.7), ("C", 0.3)]]
    assert utils.calc_maj_val(rows, "pred", "val") == 0.1
    assert utils.calc_maj_val(rows[1:], "pred", "val") == 0.9
    assert utils.calc_maj_val(rows[:1], vote_key="pred", val_key="val") == 0.1


def test_validation_metrics_are_nested_by_source_variable_and_metric():
    infos = {
        "reward": [1.0, 0.0, 0.0, 0.5, 1.0],
        "acc": [True, False, False, False, True],
        "pred": ["7", "8", "8", "9", "7"],
        "note": [None] * 5,
    }
    found = utils.process_validation_metrics(["math"] * 4 + ["gsm"], ["p", "p", "p", "p", "q"], infos)
    assert set(found) == {"math", "gsm"} and set(found["math"]) == {"reward", "acc"}
    assert found["gsm"] == {"reward": {"mean@1": 1.0}, "acc": {"mean@1": 1.0}}
    names = [f"{s}@{k}/{m}" for s in ("best", "worst", "maj") for k in (2, 4) for m in ("mean", "std")]
    assert set(found["math"]["reward"]) == {"mean@4", "std@4", *names}
    rows = [Sample("", "", s, 0, 0, extras={"pred": p}) for s, p in zip(infos["reward"], infos["pred"], strict=True)]
    assert found["math"]["reward"].items() <= variable_metrics([rows[:4]], "reward").items()
    assert found["math"]["acc"]["mean@4"] == 0.25


def test_validation_metrics_meet_bootstrap_and_majority_one_draw_at_a_time():
    scores, votes = [0.2, 1.0, 0.4], ["x", "y", "x"]
    found = utils.process_validation_metrics(["s"] * 3, [5] * 3, {"score": scores, "pred": votes})["s"]["score"]
    best, worst = utils.bootstrap_metric(scores, 2, [np.max, np.min])
    assert (found["best@2/mean"], found["best@2/std"]) == pytest.approx(best)
    assert (found["worst@2/mean"], found["worst@2/std"]) == pytest.approx(worst)
    rows = [{"pred": vote, "val": score} for vote, score in zip(votes, scores, strict=True)]
    (majority,) = utils.bootstrap_metric(rows, 3, [lambda subset: utils.calc_maj_val(subset, "pred", "val")])
    assert (found["maj@3/mean"], found["maj@3/std"]) == pytest.approx(majority)
    assert found["mean@3"] == pytest.approx(1.6 / 3) and found["std@3"] == pytest.approx(np.std(scores))
    with pytest.raises(UserError, match="seed=7"):
        utils.process_validation_metrics(["s"], [0], {"score": [1.0]}, seed=7)
