"""vLLM's own ways; what every engine with a copy of the weights must do is in test_copy_engines.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from copy_pairs import MODELS, PROMPTS, SAMPLED, Pair, require_right_log_probs, train, worst_gap

from paddock.config.roles import RolloutConfig
from paddock.engines.rollout import vllm
from paddock.engines.rollout.base import Completion, Until, requests_of
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
def test_a_pause_returns_what_was_drawn_and_the_rest_is_drawn_by_new_weights(pair):
    engine, sampling = pair.engine, replace(SAMPLED, max_tokens=24, stop_tokens=frozenset())
    requests = [
        replace(request, limit=4 if request.keys == [0, 1] else 24) for request in requests_of(PROMPTS, sampling)
    ]
    found = {part.key: part for part in engine.answer(requests, sampling, until=Until([0, 1]))}
    assert {key for key, part in found.items() if part.finished} == {0, 1} and len(found) == 6
    assert all(4 <= len(found[key].tokens) < 24 and not found[key].stopped for key in (2, 3, 4, 5))
    require_own_log_probs(pair.model, found.values(), {})
    pair.change()
    pair.sync()
    own = {key: request for request in requests for key in request.keys}
    rest = engine.answer([own[key].after(found[key]) for key in (2, 3, 4, 5)], sampling)
    assert all(part.finished and len(found[part.key].tokens) + len(part.tokens) == 24 for part in rest)
    require_own_log_probs(pair.model, rest, found)


def require_own_log_probs(model: Any, parts: Iterable[Completion], before: dict[int, Completion]) -> None:
    """Holds log-probs of parts to a forward pass over the prompt, what was drawn `before`, and the part."""
    prompts = {row: prompt.tokens for prompt in PROMPTS for row in prompt.rows}
    for part in parts:
        start = prompts[part.row] + (before[part.key].tokens if part.key in before else [])
        with torch.no_grad():
            logits = model(torch.tensor([start + part.tokens])).logits[0, len(start) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(part.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(part.log_probs), expected, atol=1e-3, rtol=0)


@pytest.mark.vllm
def test_rollouts_run_ahead(tmp_path):
    pytest.importorskip("vllm")
    keys = ("algorithm.staleness=1", "actor_rollout_ref.rollout.max_num_seqs=12", "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4")  # fmt: skip
    steps = train(tmp_path, "vllm", "trainer.total_training_steps=4", *keys)
    ages = [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps]
    assert len(ages) == 4 and max(ages) <= 1


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
