"""Real vLLM under LoRA: it takes the adapter alone, or merged weights, and its log-probs are the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from copy_pairs import LIMITS, PROMPTS, SAMPLED, SHAPE, require_right_log_probs, train, worst_gap
from tiny_models import save_tiny, tiny_model

from paddock.config.engine import OptimConfig
from paddock.engines.rollout.base import Completion
from paddock.engines.rollout.vllm import VLLMEngine, room_for_adapter
from paddock.engines.train.engine import Engine
from paddock.engines.train.open import actor_engine
from paddock.engines.train.settings import Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.adapters import Lora, attach
from paddock.models.load import load_causal_lm
from paddock.workers.probe import sync
from paddock.workers.rank import rollout_engine

pytest.importorskip("peft")


class Pair:
    """An engine that reads the model's own weights, and the trainer whose adapter it takes."""

    def __init__(self, family: str, folder: Any):
        self.family, self.path = family, str(save_tiny(folder, family, **SHAPE))
        self.trainer = Engine(
            SingleBackend(
                attach(load_causal_lm(self.path), Lora(rank=5, alpha=15, base=self.path)), Settings(optim=OptimConfig())
            )
        )
        arguments = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 16,
                     "logprobs_mode": "processed_logprobs"}  # fmt: skip
        self.engine = VLLMEngine(
            self.path, dtype=torch.float32, device="cpu", arguments=arguments, adapter_rank=self.trainer.adapters.rank
        )

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, param in self.trainer.model.named_parameters():
                if ".lora_B." in name:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.2)

    def sync(self) -> float:
        return sync(self.trainer, self.engine, LIMITS)["rollout/sync_gap"]

    def worst_gap(self, found: list[Completion], merged: bool = True) -> float:
        """Against transformers' own forward with merged weights, or with those of the model before training."""
        model = tiny_model(self.family, **SHAPE)
        if merged:
            model.load_state_dict(dict(self.trainer.weights()), strict=False)
        return worst_gap(model, found)


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def pair(request: Any, tmp_path_factory: Any) -> Iterator[Pair]:
    pytest.importorskip("vllm")
    yield Pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.vllm
def test_log_probs_are_those_of_the_adapter_after_every_sync(pair, monkeypatch):
    monkeypatch.setattr(pair.engine, "load_bucket", lambda *bucket: pytest.fail("the adapter alone travels"))
    assert pair.sync() < 1e-3  # a fresh adapter changes nothing
    assert pair.worst_gap(pair.engine.generate(PROMPTS, SAMPLED), merged=False) < 1e-3
    for seed in (1, 2):
        pair.change(seed)
        assert pair.sync() < 1e-3
        found = pair.engine.generate(PROMPTS, SAMPLED)
        assert pair.worst_gap(found) < 1e-3
        assert pair.worst_gap(found, merged=False) > 0.1
    assert pair.engine.core.list_loras() == {pair.engine.adapter.lora_int_id}


@pytest.mark.vllm
def test_a_rollout_with_an_old_adapter_is_noticed(pair, monkeypatch):
    pair.sync()
    pair.change(3)
    monkeypatch.setattr(pair.engine, "load_adapter", lambda folder: None)
    with pytest.raises(UserError, match="nats a token from the trainer's"):
        pair.sync()


@pytest.mark.vllm
@pytest.mark.parametrize("merge", [False, True])
def test_the_config_chooses_between_adapter_and_merged_weights(merge, tmp_path):
    pytest.importorskip("vllm")
    path = save_tiny(tmp_path, "qwen2", **SHAPE)
    keys = [f"actor_rollout_ref.model.path={path}", "actor_rollout_ref.model.lora_rank=4", "trainer.device=cpu",
            "actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.model.lora.merge={merge}",
            "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "data.max_prompt_length=16", "data.max_response_length=16", "data.train_files=x",
            "actor_rollout_ref.rollout.max_num_seqs=16"]  # fmt: skip
    config = load(keys).config
    trainer = actor_engine(config)
    with torch.no_grad():
        for name, param in trainer.model.named_parameters():
            if ".lora_B." in name:
                param.normal_(std=0.2)
    trainer.adapters.renew()
    engine = rollout_engine(config, trainer)
    assert engine.takes_adapter is not merge
    assert sync(trainer, engine, LIMITS)["rollout/sync_gap"] < 1e-3
    assert (engine.adapter is None) is merge


@pytest.mark.vllm
def test_grpo_trains_with_it_and_a_resumed_run_samples_with_the_adapter_it_stopped_with(tmp_path):
    pytest.importorskip("vllm")
    keys = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=1"]
    train(tmp_path, "vllm", *keys, "trainer.total_training_steps=1")
    steps = train(tmp_path, "vllm", *keys, "trainer.total_training_steps=2")
    require_right_log_probs(steps)
    assert len(steps) == 2


def test_ranks_are_rounded_up_to_what_vllm_has_room_for():
    assert [room_for_adapter(rank, "dummy")["max_lora_rank"] for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]
    assert room_for_adapter(8, "dummy")["load_format"] == "auto"
    assert room_for_adapter(8, "safetensors")["load_format"] == "safetensors"
    with pytest.raises(UserError, match="rank 512 at most"):
        room_for_adapter(513, "auto")
