"""The contract of the backends of a training engine. Nothing here knows reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from paddock.core.batch import Batch
from paddock.engines.train.outputs import EXPERT_COLUMNS as EXPERT_COLUMNS
from paddock.engines.train.outputs import Outputs as Outputs
from paddock.engines.train.outputs import Want as Want
from paddock.models.adapters import Adapters
from paddock.models.gathered import GatheredModel
from paddock.models.packing import Inputs

if TYPE_CHECKING:
    from paddock.config.engine import FrozenMegatronConfig, ShardedConfig
    from paddock.config.roles import LoraConfig
    from paddock.engines.train.optim import Updater
    from paddock.engines.train.routers import Routers
    from paddock.engines.train.settings import Budget, Settings

SHARDS = "distributed"
"""Folder of a checkpoint that several ranks wrote, and any number of them reads."""

Residency = Literal["device", "prefetch", "host"]
"""Location of offloadable weights. `prefetch`: their copy to the device has begun, beside other work."""


@dataclass(frozen=True)
class Placement:
    """Says where a role's weights are placed: its device, and the keys of the backends that spread them over ranks."""

    device: torch.device
    section: str
    """Section of the role, for errors."""
    sequence: int
    """Ranks that share each sequence under FSDP."""
    fsdp: ShardedConfig
    megatron: FrozenMegatronConfig
    lora: LoraConfig | None
    """Megatron's keys of adapters; None: the role has none."""


LossFn = Callable[[Batch, Outputs], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch's share of the loss and of each metric: `join_shares` says how shares become the mini-batch's."""


def join_shares(name: str, one: Any, other: Any) -> Any:
    """Adds two shares of a metric; of one whose name ends in `_max` the larger counts, in `_min` the smaller. Numbers
    and tensors alike."""
    if name.endswith("_max"):
        return torch.maximum(one, other) if isinstance(one, Tensor) else max(one, other)
    if name.endswith("_min"):
        return torch.minimum(one, other) if isinstance(one, Tensor) else min(one, other)
    return one + other


class Backend(Protocol):
    """Places an engine's weights on devices and computes with them: in one process, or in shards over ranks."""

    name: ClassVar[str]
    spans_ranks: ClassVar[bool]
    """True if ranks run each forward and backward together; every one of them then takes part in all."""
    settings: Settings
    device: torch.device
    model: Any
    adapters: Adapters | None
    """Adapters of peft."""
    updater: Updater | None
    """None: the weights are frozen."""
    routers: Routers

    @property
    def gathered_model(self) -> GatheredModel | None:
        """Module that shards are gathered into for a rollout; None: the model itself generates."""

    @classmethod
    def place(cls, model: Any, settings: Settings, placement: Placement) -> Backend:
        """Makes the backend of a role with the weights of a loaded model."""

    def parts(self, batch: Batch, budget: Budget) -> list[Tensor]:
        """Returns row indices of micro-batches within the budget; as many on every rank, so some may be empty."""

    def inputs(self, batch: Batch) -> Inputs: ...

    def forward(self, micro_batches: list[Batch], want: Want) -> Iterator[tuple[Batch, Outputs]]:
        """Yields each micro-batch with its outputs, in order. With gradients, the caller calls `backward` on its share
        of the loss before it asks for the next; then a pipeline yields on its last stage only."""

    def backward(self, share: Tensor) -> None:
        """Adds the gradients of the micro-batch that was yielded last; a pipeline does so when its schedule says."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Switches the adapters off for the block."""

    def everyones(self, thing: Any) -> list[Any]:
        """Returns what each rank with rows of its own gives."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors in the type the model computes in, under the module's names: adapters on their own."""

    def save_state(self, path: Path) -> None:
        """Writes what training needs beside the model's own files: the optimizer, and masters that are in shards."""

    def save_model(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Writes the model as `transformers` loads it, with these weights."""

    def load(self, path: Path) -> None:
        """Reads weights and optimizer from a folder that `Engine.save` wrote."""
