"""The embedded engine with weights of its own, which serves in a pool apart from the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paddock.engines.rollout.base import CopyEngine, Limits, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine

if TYPE_CHECKING:
    from paddock.engines.train.engine import Engine


class EmbeddedCopy(EmbeddedEngine, CopyEngine):
    """Takes the trainer's weights after each update into tensors that stay where they are, so that graphs stay too."""

    name = "embedded"

    def __init__(self, policy: Engine, **arguments: Any):
        """`policy`: the engine of a frozen policy, whose weights the trainer's replace."""
        super().__init__(policy.rollout_model, **arguments)
        self.stale = True
        self.weights = dict(policy.weights())

    def resume(self, sampling: Sampling, limits: Limits) -> None:
        assert not self.stale, "the engine has no weights yet"
        super().resume(sampling, limits)

    @torch.no_grad()
    def load_bucket(self, bucket: list[tuple[str, Tensor]], first: bool, last: bool) -> None:
        for name, tensor in bucket:
            self.weights[name].copy_(tensor)
        self.stale = not last

    def differing_layers(self) -> list[str]:
        return []
