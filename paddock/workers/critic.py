"""The critic: a value model that is trained beside the actor."""

from __future__ import annotations

from torch import Tensor

from paddock.algorithms.losses import value_loss
from paddock.config.roles import CriticConfig
from paddock.core.batch import Batch, PerToken
from paddock.engines.train.base import Outputs, TrainEngine
from paddock.workers.role import MiniBatch, TrainedRole


class Critic(TrainedRole):
    """A value model: one number per token."""

    wants = frozenset({"values"})

    def __init__(self, engine: TrainEngine, keys: CriticConfig):
        super().__init__(engine, "critic")
        self.keys = keys

    def values(self, batch: Batch) -> PerToken:
        values = self.forward(batch, self.wants).values
        assert values is not None
        return values

    def loss(self, mini: MiniBatch, micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.values is not None
        old, returns, mask = micro.need("values"), micro.need("returns"), micro.need("mask")
        return value_loss(outputs.values, old, returns, mask, self.keys, mini.denominators)
