"""vLLM's own ways; what every engine with a copy of the weights must do is in test_copy_engines.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from copy_pairs import MODELS, PROMPTS, SAMPLED, Pair, require_right_log_probs, train, worst_gap

from paddock.config.roles import RolloutConfig
from paddock.engines.rollout import vllm
from paddock.engines.rollout.vllm import logprobs_mode
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.loading.rules import Scope, broken


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: Any, tmp_path_factory: Any) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    pair = Pair("vllm", request.param, tmp_path_factory.mktemp(request.param))
    pair.sync()
    yield pair


@pytest.mark.vllm
def test_a_head_that_stays_stale_stops_the_run_by_name(pair, monkeypatch):
    if not pair.model.config.tie_word_embeddings:
        pytest.skip("a head of its own is reloaded")
    monkeypatch.setattr(vllm, "pack_tied_head", lambda model: None)
    pair.change()
    with pytest.raises(UserError, match="lm_head"):
        pair.sync()
    monkeypatch.undo()
    assert pair.sync() < 1e-3


@pytest.mark.vllm
def test_arguments_that_vllm_does_not_have_or_that_are_ours_are_refused_by_name(pair):
    for name in ("max_num_seq", "skip_tokenizer_init"):
        with pytest.raises(UserError) as refused:
            vllm.start({}, {name: 3})
        assert refused.value.key == f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}"


@pytest.mark.vllm
def test_two_ranks_share_the_weights_and_give_the_same_log_probs(tmp_path):
    pytest.importorskip("vllm")
    pair = Pair("vllm", "tied", tmp_path, tensor_parallel_size=2)
    pair.sync()
    pair.change()
    assert pair.sync() < 1e-3
    assert pair.engine.differing_layers() == []
    assert worst_gap(pair.model, pair.engine.generate(PROMPTS, SAMPLED)) < 1e-3


@pytest.mark.vllm
def test_grpo_trains_with_it_and_a_resumed_run_samples_from_the_weights_it_stopped_with(tmp_path):
    pytest.importorskip("vllm")
    train(tmp_path, "vllm", "trainer.total_training_steps=1", "trainer.save_freq=1")
    steps = train(tmp_path, "vllm", "trainer.total_training_steps=2", "trainer.save_freq=1")
    assert len(steps) == 2
    require_right_log_probs(steps)


@pytest.mark.vllm
def test_ray_workers_have_an_engine_each_or_share_one_and_train_alike(tmp_path):
    """FSDP2's shards become whole weights in each worker's engine, or halves of them in both."""
    pytest.importorskip("vllm")
    pytest.importorskip("ray")
    size, two = "actor_rollout_ref.rollout.tensor_model_parallel_size", "trainer.n_gpus_per_node=2"
    steps = ("trainer.total_training_steps=2", "trainer.save_freq=-1")
    runs = [train(tmp_path / str(ranks), "vllm", *steps, two, f"{size}={ranks}") for ranks in (1, 2)]
    for run in runs:
        require_right_log_probs(run)
    for one, other in zip(*runs, strict=True):
        for name in ("reward/score/mean", "response_length/mean", "actor/grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3)


def test_log_probs_are_asked_for_before_filters_or_refused():
    assert logprobs_mode(RolloutConfig(temperature=0.7)) == "processed_logprobs"
    assert logprobs_mode(RolloutConfig(top_p=0.9)) == "raw_logprobs"
    assert logprobs_mode(RolloutConfig(min_tokens=2)) == "raw_logprobs"
    key = "actor_rollout_ref.rollout"
    for settings in ([f"{key}.top_k=5"], [f"{key}.logprobs_mode=raw_logprobs"]):
        config = load([f"{key}.name=vllm", f"{key}.temperature=0.7", *settings]).config
        assert [*broken(config, Scope.TRAINING)]
