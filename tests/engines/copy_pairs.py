"""Engines with a copy of the weights, each beside the trainer whose weights it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from stops import letter_tokenizer
from tiny_models import EOS, save_tiny, tiny_model

from paddock.config.roles import RolloutConfig
from paddock.engines.rollout import served
from paddock.engines.rollout.base import Completion, CopyEngine, Prompt, Sampling
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.load import load_causal_lm
from paddock.workers import probe
from tests.forked import ForkedModule

SAMPLED = Sampling(max_tokens=10, stop_tokens=frozenset({EOS}), seed=1, step=0)
PROMPTS = [Prompt([30 + i + j for j in range(length)], [2 * i, 2 * i + 1]) for i, length in enumerate((4, 11, 2))]
SHAPE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}  # a CPU's kernels take heads of 32 and more
MODELS = {"tied": ("qwen2", SHAPE), "untied": ("llama", SHAPE)}
LIMITS = RolloutConfig(prompt_length=16, response_length=16)
BUCKET = 100_000  # bytes: several buckets
RECORDED = Path(__file__).parent / "recorded"
"""SGLang's protocol, on PYTHONPATH in place of SGLang."""


class Pair:
    """An engine, and the trainer whose weights it takes."""

    def __init__(self, engine: str, kind: str, folder: Path, device: str = "cpu", **arguments: Any):
        family, shape = MODELS[kind]
        path = str(save_tiny(folder, family, **shape))
        self.trainer = Engine(SingleBackend(load_causal_lm(path), Settings()))
        self.twin = tiny_model(family, **shape)
        self.engine: Any = (open_vllm if engine == "vllm" else open_sglang)(path, device, arguments)
        assert isinstance(self.engine, CopyEngine)

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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe, "bucket_bytes", lambda limits: BUCKET)
            return probe.sync(self.trainer, self.engine, LIMITS)["rollout/sync_gap"]


def open_vllm(path: str, device: str, arguments: dict[str, Any]) -> Any:
    from paddock.engines.rollout.vllm import VLLMEngine

    arguments = {
        "load_format": "dummy",
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 16,
        "logprobs_mode": "processed_logprobs",
        **arguments,
    }
    return VLLMEngine(path, dtype=torch.float32, device=device, arguments=arguments)


def open_sglang(path: str, device: str, arguments: dict[str, Any]) -> Any:
    from paddock.engines.rollout.sglang import SGLangEngine

    staged, letters = arguments.pop("staged_wake", False), f"{path}-letters"
    letter_tokenizer().save_pretrained(letters)
    arguments = {
        "load_format": "dummy",
        "context_length": 64,
        "max_running_requests": 16,
        "tp_size": 1,
        "pp_size": 1,
        "enable_deterministic_inference": True,
        **arguments,
    }
    with pytest.MonkeyPatch.context() as patch:  # tests of how it starts and ends start it really
        patch.setattr(served.subprocess, "Popen", ForkedModule)
        return SGLangEngine(
            path,
            dtype=torch.float32,
            device=device,
            arguments=arguments,
            staged_wake=staged,
            tokenizer=letters,
        )


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


def train(folder: Path, engine: str, *settings: str, **environment: str) -> list[dict[str, float]]:
    """Metrics of GRPO on the built-in model, in a process of its own."""
    command = [
        sys.executable, "-m", "paddock.cli", "train", "algorithm.adv_estimator=grpo", "data.train_batch_size=16",
        f"actor_rollout_ref.rollout.name={engine}", "trainer.device=cpu", "trainer.val_before_train=False",
        "trainer.test_freq=-1", f"trainer.default_local_dir={folder}", *settings,
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def require_right_log_probs(steps: list[dict[str, float]]) -> None:
    assert all(step["rollout/sync_gap"] < 1e-3 for step in steps)
    assert all(step["rollout_corr/log_ppl_abs_diff"] < 1e-3 for step in steps)
