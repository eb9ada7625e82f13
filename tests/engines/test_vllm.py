"""Real vLLM beside transformers: the same tokens and log-probs, before and after new weights, and a guard on both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT
from tiny_models import EOS, save_tiny, tiny_model

from paddock.config.roles import RolloutConfig
from paddock.engines.rollout import vllm
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.vllm import VLLMEngine, buckets, row_seeds
from paddock.engines.train.settings import Settings
from paddock.engines.train.single import SingleEngine
from paddock.errors import UserError
from paddock.models.load import load_causal_lm
from paddock.workers.crew import logprobs_mode
from paddock.workers.probe import sync

SAMPLED = Sampling(max_tokens=10, stop_tokens=frozenset({EOS}), seed=1, step=0)
PROMPTS = [Prompt([30 + i + j for j in range(length)], [2 * i, 2 * i + 1]) for i, length in enumerate((4, 11, 2))]
SHAPE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}  # a CPU's kernels take heads of 32 and more
MODELS = {"tied": ("qwen2", SHAPE), "untied": ("llama", SHAPE)}
LIMITS = RolloutConfig(prompt_length=16, response_length=16)


class Pair:
    """An engine, and the trainer whose weights it takes."""

    def __init__(self, kind: str, folder: Any, **arguments: Any):
        family, shape = MODELS[kind]
        path = str(save_tiny(folder, family, **shape))
        self.trainer = SingleEngine(load_causal_lm(path), Settings())
        self.twin = tiny_model(family, **shape)
        self.engine = VLLMEngine(
            path,
            dtype=torch.float32,
            device="cpu",
            arguments={
                "load_format": "dummy",
                "enforce_eager": True,
                "max_model_len": 64,
                "max_num_seqs": 16,
                "logprobs_mode": "processed_logprobs",
                **arguments,
            },
            bucket_bytes=100_000,  # several buckets
        )

    @property
    def model(self) -> Any:
        """transformers' own, with the trainer's weights."""
        self.twin.load_state_dict(self.trainer.model.state_dict())
        return self.twin

    def change(self) -> None:
        with torch.no_grad():
            for param in self.trainer.model.parameters():
                param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)) * 0.05)

    def sync(self) -> float:
        return sync(self.trainer, self.engine, LIMITS)["rollout/sync_gap"]


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: Any, tmp_path_factory: Any) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    pair = Pair(request.param, tmp_path_factory.mktemp(request.param))
    pair.sync()
    yield pair


@torch.no_grad()
def worst_gap(model: Any, found: list[Completion], temperature: float = 1.0) -> float:
    """Against transformers' own forward, without padding or cache."""
    worst = 0.0
    prompts = {row: prompt.tokens for prompt in PROMPTS for row in prompt.rows}
    for one in found:
        prompt = prompts[one.row]
        logits = model(torch.tensor([prompt + one.tokens])).logits[0, len(prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        worst = max(worst, (expected - torch.tensor(one.log_probs)).abs().max().item())
    return worst


@pytest.mark.vllm
def test_log_probs_are_those_of_transformers_before_and_after_new_weights(pair):
    before = pair.engine.generate(PROMPTS, SAMPLED)
    assert worst_gap(pair.model, before) < 1e-3
    pair.change()
    assert worst_gap(pair.model, before) > 0.1  # new weights matter
    assert pair.sync() < 1e-3
    for temperature in (1.0, 0.7):
        after = pair.engine.generate(PROMPTS, replace(SAMPLED, temperature=temperature))
        assert worst_gap(pair.model, after, temperature) < 1e-3


@pytest.mark.vllm
def test_greedy_answers_are_those_of_the_embedded_engine(pair):
    greedy = replace(SAMPLED, temperature=0.0)
    expected = EmbeddedEngine(pair.trainer.model, max_num_seqs=4, max_num_batched_tokens=64).generate(PROMPTS, greedy)
    found = pair.engine.generate(PROMPTS, greedy)
    assert [(one.row, one.tokens, one.stopped) for one in found] == [(e.row, e.tokens, e.stopped) for e in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-3, rtol=0)


@pytest.mark.vllm
def test_samples_of_a_prompt_differ_and_depend_neither_on_order_nor_on_company(pair):
    expected = {one.row: one.tokens for one in pair.engine.generate(PROMPTS, SAMPLED)}
    assert expected[0] != expected[1]
    assert {one.row: one.tokens for one in pair.engine.generate(PROMPTS[::-1], SAMPLED)} == expected
    assert pair.engine.generate([Prompt(PROMPTS[1].tokens, [3])], SAMPLED)[0].tokens == expected[3]
    assert {one.row: one.tokens for one in pair.engine.generate(PROMPTS, replace(SAMPLED, step=1))} != expected


@pytest.mark.vllm
def test_a_response_ends_with_its_stop_token_and_those_that_end_early_are_told_early(pair):
    free = pair.engine.generate(PROMPTS, replace(SAMPLED, ignore_eos=True))
    assert all(len(one.tokens) == 10 and not one.stopped for one in free)
    stops = frozenset({free[0].tokens[3]})
    early: list[Completion] = []
    found = pair.engine.generate(PROMPTS, replace(SAMPLED, stop_tokens=stops), early.extend)
    for one, whole in zip(found, free, strict=True):
        end = next((place + 1 for place, token in enumerate(whole.tokens) if token in stops), None)
        assert (one.tokens, one.stopped) == (whole.tokens[:end], end is not None)
    assert found[0] in early and len(early) < len(found)
    assert len(pair.engine.generate(PROMPTS, replace(SAMPLED, stop_tokens=stops, ignore_eos=True))[0].tokens) == 10


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
def test_a_layer_that_is_not_sent_stops_the_run_by_name(pair, monkeypatch):
    old = {name: tensor.clone() for name, tensor in pair.trainer.weights()}
    pair.change()
    layer = "model.layers.1.mlp.down_proj.weight"
    receive = pair.engine.llm.collective_rpc

    def lose(method: str, args: Any = ()) -> Any:
        if method == "paddock_receive":
            args = ([(name, old[name] if name == layer else tensor) for name, tensor in args[0]], *args[1:])
        return receive(method, args=args)

    with monkeypatch.context() as patch:
        patch.setattr(pair.engine.llm, "collective_rpc", lose)
        with pytest.raises(UserError, match=f"sent: {layer}\n"):
            pair.sync()
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
    pair = Pair("tied", tmp_path, tensor_parallel_size=2)
    pair.sync()
    pair.change()
    assert pair.sync() < 1e-3
    assert pair.engine.differing_layers() == []
    assert worst_gap(pair.model, pair.engine.generate(PROMPTS, SAMPLED)) < 1e-3


def train(folder: Any, *settings: str) -> list[dict[str, float]]:
    """Metrics of two steps of GRPO on the built-in model, in a process of its own."""
    command = [
        sys.executable, "-m", "paddock.cli", "train", "algorithm.adv_estimator=grpo", "data.train_batch_size=16",
        "actor_rollout_ref.rollout.name=vllm", "trainer.device=cpu", "trainer.val_before_train=False",
        "trainer.test_freq=-1", f"trainer.default_local_dir={folder}", *settings,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def require_right_log_probs(steps: list[dict[str, float]]) -> None:
    assert all(step["rollout/sync_gap"] < 1e-3 for step in steps)
    assert all(step["rollout_corr/log_ppl_abs_diff"] < 1e-3 for step in steps)


@pytest.mark.vllm
def test_grpo_trains_with_it_and_a_resumed_run_samples_from_the_weights_it_stopped_with(tmp_path):
    pytest.importorskip("vllm")
    train(tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=1")
    steps = train(tmp_path, "trainer.total_training_steps=2", "trainer.save_freq=1")
    assert len(steps) == 2
    require_right_log_probs(steps)


@pytest.mark.vllm
def test_ray_workers_have_an_engine_each_or_share_one_and_train_alike(tmp_path):
    """FSDP2's shards become whole weights in each worker's engine, or halves of them in both."""
    pytest.importorskip("vllm")
    pytest.importorskip("ray")
    size, two = "actor_rollout_ref.rollout.tensor_model_parallel_size", "trainer.n_gpus_per_node=2"
    runs = [
        train(tmp_path / str(ranks), "trainer.total_training_steps=2", "trainer.save_freq=-1", two, f"{size}={ranks}")
        for ranks in (1, 2)
    ]
    for steps in runs:
        require_right_log_probs(steps)
    for one, other in zip(*runs, strict=True):
        for name in ("reward/score/mean", "response_length/mean", "actor/grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3)


def test_buckets_hold_all_weights_in_order_and_no_more_than_their_size():
    weights = [(str(i), torch.zeros(size)) for i, size in enumerate((10, 10, 30, 1, 1))]
    parts = list(buckets(weights, 80))
    assert [[name for name, _ in bucket] for bucket, _ in parts] == [["0", "1"], ["2"], ["3", "4"]]
    assert [last for _, last in parts] == [False, False, True]


def test_a_rows_seed_is_its_own():
    seeds = row_seeds([0, 1, 2], SAMPLED)
    assert row_seeds([2, 0], SAMPLED) == [seeds[2], seeds[0]] and len(set(seeds)) == 3
    assert row_seeds([0, 1, 2], replace(SAMPLED, step=1)) != seeds != row_seeds([0, 1, 2], replace(SAMPLED, seed=2))
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert row_seeds([0], replace(SAMPLED, temperature=0.0)) == [None]


def test_log_probs_are_asked_for_before_filters_or_refused():
    assert logprobs_mode(RolloutConfig(temperature=0.7)) == "processed_logprobs"
    assert logprobs_mode(RolloutConfig(top_p=0.9)) == "raw_logprobs"
    for settings in ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "logprobs_mode": "raw_logprobs"}):
        with pytest.raises(UserError):
            logprobs_mode(RolloutConfig(**settings))
