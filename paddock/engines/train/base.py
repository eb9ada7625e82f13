"""What a training engine does. It knows tensors, models and optimizers, and nothing about reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from paddock.core.batch import Batch, PerToken
from paddock.models.experts import Routing

SHARDS = "distributed"
"""Folder of a checkpoint that several ranks wrote, and any number of them reads."""

Residency = Literal["device", "prefetch", "host"]
"""Where offloadable weights are. `prefetch`: their copy to the device has begun, beside other work."""

Want = frozenset[str]  # any of: log_probs, entropy, sum_pi_squared, values, and the columns of experts
EXPERT_COLUMNS = frozenset({"prompt_experts", "response_experts"})


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a forward gives for every response token of its batch, in the batch's shape; None where not wanted."""

    log_probs: PerToken | None = None
    entropy: PerToken | None = None
    sum_pi_squared: PerToken | None = None
    values: PerToken | None = None
    prompt_experts: Tensor | None = None
    response_experts: Tensor | None = None
    routing: Routing | None = None
    """Of the experts in this forward; not a column."""


LossFn = Callable[[Batch, Outputs], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch's share of the loss and of each metric: `join_shares` says how shares become the mini-batch's."""


def join_shares(name: str, one: Any, other: Any) -> Any:
    """Adds two shares of a metric; of one whose name ends in `_max` the larger counts. Numbers and tensors alike."""
    if not name.endswith("_max"):
        return one + other
    return torch.maximum(one, other) if isinstance(one, Tensor) else max(one, other)


class TrainEngine(Protocol):
    device: torch.device

    def forward(self, batch: Batch, want: Want) -> Outputs:
        """Without gradient, in micro-batches of the engine's own choice. Position t speaks of response token t."""
        ...

    def train_step(self, micro_batches: list[Batch], loss: LossFn, want: Want) -> dict[str, float]:
        """One optimizer step: zero, forward and backward of each micro-batch, clip, step.

        Joins the metrics' shares; adds `grad_norm`, `lr` and `skipped` (1.0 where a non-finite loss or gradient made
        the step void).
        """
        ...

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """A mini-batch cut to the engine's token budget or row count."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names."""
        ...

    def everyones(self, thing: Any) -> list[Any]:
        """What each rank with rows of its own gives; every rank must call it."""
        ...

    def move(self, where: Residency) -> None:
        """Moves the offloadable weights. "host" also moves the optimizer state, which returns when a step begins."""
        ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...
