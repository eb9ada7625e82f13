"""How ranks share a role's weights, gradients and moments, and what each of them then holds, in bytes.

The formulas of FSDP are in memory.py, those of Megatron at its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paddock.facts.models import ModelShape


def share(amount: int, ways: int) -> int:
    """The largest part when `amount` is split `ways`."""
    return -(-amount // ways)


@dataclass(frozen=True)
class States:
    parameters: int
    gradients: int = 0
    optimizer: int = 0
    host: int = 0
    """What is never on the GPU: it lives in host memory, also in an update."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Fsdp:
    """Every tensor split over `degree` ranks; weights gathered a layer at a time."""

    degree: int = 1
    sequence: int = 1
    """Ranks that share one row's tokens (Ulysses)."""
    on_host: bool = False
    """FSDP2's offload policy: weights, gradients and moments stay on the host, and the optimizer runs there."""
    frozen_bytes: int = 2
    """Bytes of a weight that LoRA does not train: it is held in the type it computes in."""
    alone: bool = False
    """True if one rank trains without FSDP: nothing is gathered, and the optimizer keeps masters of narrow weights."""

    tensor: ClassVar[int] = 1
    keeps_gradients: ClassVar[bool] = False

    @property
    def whole(self) -> bool:
        """True if one rank holds every weight in full."""
        return self.degree == 1

    def states(self, shape: ModelShape, dtype_bytes: int, lora: int, frozen: int = 0) -> States:
        trained = lora or shape.parameters - frozen
        if self.alone and self.frozen_bytes < dtype_bytes and not lora:
            weights = self.frozen_bytes * shape.parameters
            return States(weights, gradients=dtype_bytes * trained, optimizer=3 * dtype_bytes * trained)
        held = States(
            parameters=share(self._weights(shape, dtype_bytes, lora), self.degree),
            gradients=share(dtype_bytes * trained, self.degree),
            optimizer=share(2 * dtype_bytes * trained, self.degree),
        )
        return States(0, host=held.total) if self.on_host else held

    def _weights(self, shape: ModelShape, dtype_bytes: int, lora: int) -> int:
        if not lora:
            return dtype_bytes * shape.parameters
        copies = self.frozen_bytes if self.whole and self.frozen_bytes < dtype_bytes else 0
        return self.frozen_bytes * shape.parameters + (dtype_bytes + copies) * lora

    def gathered(self, shape: ModelShape, dtype_bytes: int, compute_bytes: int, updating: bool) -> int:
        if self.degree == 1 and dtype_bytes == compute_bytes and not self.on_host:
            return 0
        root, layer = shape.embedding_parameters, shape.layer_parameters
        if self.alone:
            return compute_bytes * (root + layer) if updating else 0
        return compute_bytes * (2 * root + 3 * layer if updating else root + 2 * layer)


@dataclass(frozen=True)
class Megatron:
    """Tensor x pipeline x expert parallel over `world` ranks. The fullest rank counts: the stage with most layers.

    W           D + E          D = (its layers + its end of the model) / tp, E = experts of its layers / (etp ep)
    ends        the first stage holds the input embedding and an image tower, the last one the head
    parameters  2 W
    gradients   4 W
    optimizer   12 D tp pp / world + 12 E etp ep pp / world   master copy and moments: the distributed optimizer
                               splits them over the ranks that hold the same weights; else 12 W
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """None follows `tensor`."""
    distributed_optimizer: bool = True
    host_optimizer: float = 0.0
    """Share of the optimizer that lives on the host and steps there (optimizer_cpu_offload)."""

    frozen_bytes: ClassVar[int] = 2
    alone: ClassVar[bool] = False
    keeps_gradients: ClassVar[bool] = True
    """True if gradient buffers live as long as the weights do."""

    @property
    def whole(self) -> bool:
        return self.tensor * self.pipeline * self.expert == 1

    @property
    def sequence(self) -> int:
        return self.context

    def states(self, shape: ModelShape, dtype_bytes: int, lora: int, frozen: int = 0) -> States:
        """`dtype_bytes` is unused: weights are bf16 beside their fp32 master copy."""
        ways, expert_ways = self.tensor, (self.expert_tensor or self.tensor) * self.expert
        layers, experts = self._stage(shape)
        dense, sparse = share(layers, ways), share(experts, expert_ways)
        adapter = share(lora, ways * self.pipeline)
        trained = adapter or dense + sparse - share(frozen, ways)
        moments = 12 * trained
        if self.distributed_optimizer:
            copies = max(1, self.world // (ways * self.pipeline))
            expert_copies = max(1, self.world // (expert_ways * self.pipeline))
            split = share(12 * (dense - share(frozen, ways)), copies) + share(12 * sparse, expert_copies)
            moments = share(12 * adapter, copies) if adapter else split
        away = int(self.host_optimizer * moments)
        return States(2 * (dense + sparse + adapter), 4 * trained, moments - away, host=away)

    def _stage(self, shape: ModelShape) -> tuple[int, int]:
        """Weights of the fullest pipeline stage before they are split further: without experts, and experts."""
        layers = share(shape.layers, self.pipeline)
        experts = shape.moe_layers * shape.experts * shape.expert_parameters
        body = shape.parameters - shape.embedding_parameters - shape.vision_params - experts
        table = shape.vocab * shape.hidden
        if self.pipeline == 1:
            ends = shape.embedding_parameters + shape.vision_params
        else:  # the last stage of a tied model has a copy of the table
            ends = max(table + shape.vision_params, shape.hidden if shape.scalar_head else table)
        sparse = min(layers, shape.moe_layers)
        return share(body * layers, shape.layers) + ends, share(experts * sparse, max(1, shape.moe_layers))

    def gathered(self, shape: ModelShape, dtype_bytes: int, compute_bytes: int, updating: bool) -> int:
        return 0
