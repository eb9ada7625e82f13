"""The critic: a value model that is trained beside the actor."""

from __future__ import annotations

from torch import Tensor

from paddock.algorithms.losses import value_loss
from paddock.config.roles import CriticConfig
from paddock.core.batch import Batch, PerToken
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.workers.role import MiniBatch, TrainedRole


class Critic(TrainedRole):
    """A value model: one number per token."""

    wants = frozenset({"values"})

    def __init__(self, engine: Engine, keys: CriticConfig):
        super().__init__(engine, "critic")
        self.keys = keys

    def values(self, batch: Batch) -> PerToken:
        return self.forward(batch, self.wants).need("values")

    def loss(self, mini: MiniBatch, micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        old, returns, mask = micro.need("values"), micro.need("returns"), micro.need("mask")
        return value_loss(outputs.need("values"), old, returns, mask, self.keys, mini.denominators)
