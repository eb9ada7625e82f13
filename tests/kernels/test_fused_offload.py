"""The fused forward with its weights away in between, and with what its layers keep for backward on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interpreted import DEVICE, on_gpu
from tiny_models import tiny_batch, tiny_model

from paddock.config.engine import OptimConfig
from paddock.core.device import CopyStream
from paddock.engines.train.activations import Activations, SavedTensors
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.fused import fused

WANT = frozenset({"log_probs"})
BATCH = tiny_batch(2, prompt_len=3, response_len=4)  # triton's interpreter takes its time for every token


def engine_of(**changes: Any) -> Engine:
    model = tiny_model("qwen3").to(DEVICE)
    model.set_attn_implementation("paddock")
    engine = Engine(SingleBackend(model, Settings(optim=OptimConfig(lr=0.01), budget=Budget(64), **changes)))
    assert fused(engine.backend.backbone) is not None
    return engine


def loss(micro: Any, outputs: Any) -> Any:
    return (outputs.log_probs * micro.mask).sum() / 20, {}


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    engine.model.train()
    engine.updater.zero()
    engine._backward([BATCH], loss, WANT)
    return {name: param.grad.clone() for name, param in engine.model.named_parameters()}


def test_weights_that_were_away_compute_as_before_and_are_trained():
    engine, other = engine_of(offload_params=True, offload_optimizer=True), engine_of()
    offload_idle(engine, least=1)
    joined = fused(engine.backend.backbone).layers[0].qkv.weight
    for _ in range(2):
        engine.move("host")
        assert joined.untyped_storage().nbytes() == 0
        engine.move("device")
        found, wanted = (one.train_step([BATCH], loss, WANT) for one in (engine, other))
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-6)
    for name, weight in dict(other.backend.tensors()).items():
        torch.testing.assert_close(dict(engine.backend.tensors())[name], weight, atol=1e-6, rtol=1e-5)


@on_gpu
def test_what_recomputed_layers_keep_waits_on_the_host_and_the_gradients_are_the_same():
    expected = gradients(engine_of(checkpointing=True))
    engine = engine_of(checkpointing=True)
    forwards: list[SavedTensors] = []

    class Noted(Activations):
        @contextmanager
        def offloaded(self) -> Iterator[SavedTensors]:
            with super().offloaded() as saved:
                forwards.append(saved)
                yield saved

    engine.backend.activations = Noted(engine.model, CopyStream(DEVICE), least=64)
    found = gradients(engine)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)
    (saved,) = forwards
    config = engine.backend.backbone.config
    streams = [one for one in saved.tensors if one.shape[-1] == config.hidden_size]
    assert len(streams) == config.num_hidden_layers + 2  # and what the last norm and the head read
    assert all(one.uses == 0 and one.on_device is None for one in saved.tensors)
