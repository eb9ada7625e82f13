"""Trains and generates on a device, cpu or npu, and prints what came out as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import EOS, tiny_batch

from paddock.config.engine import OptimConfig
from paddock.core import device as devices
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.engine import Engine
from paddock.engines.train.offload import offloads_of
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.load import load_causal_lm

PROMPTS = [Prompt([5, 6, 7], [0, 1]), Prompt([9], [2])]
SAMPLING = Sampling(max_tokens=8, stop_tokens=frozenset({EOS}), seed=1, step=0)
WANT = frozenset({"log_probs", "entropy"})


def loss(micro: Any, outputs: Any) -> Any:
    return ((outputs.log_probs - 0.1 * outputs.entropy) * micro.mask).sum(), {}


def main(kind: str, path: str, dtype: str) -> dict[str, Any]:
    device = devices.device_of(kind)
    model = load_causal_lm(path, dtype=devices.DTYPES[dtype], device=device)
    settings = Settings(
        optim=OptimConfig(lr=0.01),
        compute=devices.DTYPES[dtype],
        budget=Budget(24),
        checkpointing=True,
        offload_activations=True,
        offload_params=True,
        offload_optimizer=True,
        total_steps=9,
    )
    engine = Engine(SingleBackend(model, settings))
    if engine.backend.activations is not None:
        engine.backend.activations.least = 64
    for offload in offloads_of(engine):
        offload.least = 64
    devices.seed_all(3)
    batch = tiny_batch(6)
    found: dict[str, Any] = {"device": str(device), "mask": batch.mask.tolist()}
    found["log_probs"] = engine.forward(batch, WANT).log_probs.float().tolist()
    rollouts = (EmbeddedEngine(model, max_num_seqs=4, max_num_batched_tokens=64), HFEngine(model))
    found["tokens"] = [[one.tokens for one in rollout.generate(PROMPTS, SAMPLING)] for rollout in rollouts]
    found["norms"], found["idle"] = [], []
    for _ in range(2):
        engine.move("device")
        found["norms"].append(engine.train_step(engine.micro_batches(batch), loss, WANT)["grad_norm"])
        present = devices.memory_in_use(device)
        engine.move("host")
        found["idle"].append([present, devices.memory_in_use(device)])
    found["weights"] = sum(param.nbytes for param in model.parameters())
    engine.save(Path(path) / f"saved-{kind}")
    devices.synchronize(device)
    devices.empty_cache(device)
    if kind == "npu":
        npu = sys.modules["torch_npu"]
        found["attended"], found["streams"] = npu.attended, npu.streams
        found["memory"] = [devices.peak_memory(device), devices.memory_in_use(device)]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(*sys.argv[1:])))
