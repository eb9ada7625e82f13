"""Activations that wait on the host under FSDP2: the same gradients, and gathered weights do not travel with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devices import DEVICE
from ranks import Ranks
from tiny_models import tiny_batch, tiny_model
from tiny_updates import in_role, over_ranks
from torch import Tensor

from paddock.config.engine import OptimConfig
from paddock.core.device import CopyStream
from paddock.engines.train.activations import Activations, SavedTensors
from paddock.engines.train.engine import Engine
from paddock.engines.train.fsdp import FSDPBackend
from paddock.engines.train.optim import whole
from paddock.engines.train.settings import Budget, Settings

WANT = frozenset({"log_probs", "entropy"})


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def loss(micro: Any, outputs: Any) -> Any:
    return ((outputs.log_probs + outputs.entropy) * micro.mask).square().sum(), {}


def gradients(rank: int, checkpointing: bool, away: bool, sequence: int) -> tuple[dict[str, Tensor], list[Any]]:
    model = in_role(tiny_model("qwen2"), "actor")
    settings = Settings(optim=OptimConfig(lr=0.01), budget=Budget(24), checkpointing=checkpointing)
    engine = Engine(FSDPBackend(model, settings, over_ranks(sequence=sequence)))
    travelled: list[Any] = []
    if away:
        leave = SavedTensors.save

        def noted(saved: SavedTensors, tensor: Tensor) -> Any:
            found = leave(saved, tensor)
            travelled.extend([] if isinstance(found, Tensor) else [tuple(tensor.shape)])
            return found

        SavedTensors.save = noted  # type: ignore[method-assign]
        engine.backend.activations = Activations(engine.model, CopyStream(DEVICE), least=64)
    engine.model.train()
    assert engine.updater is not None
    engine.updater.zero()
    rows = tiny_batch(6) if sequence > 1 else tiny_batch(6).rows(torch.arange(3) + 3 * rank)
    engine._backward(engine.micro_batches(rows), loss, WANT)
    if away:
        SavedTensors.save = leave  # type: ignore[method-assign]
    found = {name: whole(param.grad) for name, param in engine.model.named_parameters()}
    return {name: gradient.clone() for name, gradient in found.items()}, travelled


@pytest.mark.parametrize(("checkpointing", "sequence"), [(True, 1), (False, 1), (True, 2)])
def test_gradients_of_shards_are_the_same_to_the_last_bit(ranks, checkpointing, sequence):
    expected, _ = ranks(gradients, checkpointing, False, sequence)[0]
    found, travelled = ranks(gradients, checkpointing, True, sequence)[0]
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    weights = {tuple(param.shape) for param in tiny_model("qwen2").parameters() if param.ndim == 2}
    assert travelled and not weights & set(travelled) and not {shape[::-1] for shape in weights} & set(travelled)
