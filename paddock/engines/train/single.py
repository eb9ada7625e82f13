"""The backend for one device: the model itself, and the optimizer's masters beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paddock.core.batch import Batch
from paddock.core.device import keep_freed_memory, make_deterministic
from paddock.engines.train import forwards
from paddock.engines.train.activations import activation_offload
from paddock.engines.train.base import EXPERT_COLUMNS, SHARDS, Outputs, Placement, Want
from paddock.engines.train.checkpoints import OPTIMIZER_FILE, own_tensors, save_whole, stored_weights
from paddock.engines.train.optim import updater_of
from paddock.engines.train.routers import Routers
from paddock.engines.train.settings import Budget, Settings
from paddock.models.adapters import adapters_of
from paddock.models.fused import fuse
from paddock.models.packing import Inputs
from paddock.models.value_head import ValueModel


class SingleBackend:
    """See `Backend`. Weights and gradients are whole: nothing is gathered or reduced."""

    name: ClassVar = "single"
    spans_ranks: ClassVar = False
    gathered_model = None

    def __init__(self, model: PreTrainedModel | ValueModel, settings: Settings):
        self.model, self.settings, self.backbone = model, settings, forwards.backbone_of(model)
        self.device = self.backbone.device
        keep_freed_memory(self.device)
        self.adapters = adapters_of(self.backbone)
        self.routers = Routers(self.backbone, settings.routers)
        self.activations = activation_offload(model, settings, self.device)
        if settings.deterministic:
            make_deterministic(self.device)
        self.updater = updater_of(model, settings, forwards.compute_dtypes(model, settings.compute))
        if self.adapters and settings.computes_merged:
            self.adapters.hold_merged()
        reason = fuse(self.backbone, settings.exact, keep_apart=settings.offload_params)
        forwards.tell_unfused(self.backbone, settings, reason)

    @classmethod
    def place(cls, model: Any, settings: Settings, placement: Placement) -> Self:
        return cls(model, settings)

    @property
    def shares_prompts(self) -> bool:
        return forwards.shares_prompts(self.settings, self.routers)

    def parts(self, batch: Batch, budget: Budget) -> list[Tensor]:
        return budget.split(batch, self.shares_prompts)

    def inputs(self, batch: Batch) -> Inputs:
        return forwards.inputs_of(batch, self.device, self.settings.packed, self.shares_prompts)

    def forward(self, micro_batches: list[Batch], want: Want) -> Iterator[tuple[Batch, Outputs]]:
        for micro in micro_batches:
            with self.activations.offloaded() if self.activations else nullcontext():
                outputs = self.outputs(micro, want)
            yield micro, outputs

    def outputs(self, batch: Batch, want: Want) -> Outputs:
        inputs = self.routers.watch(self.inputs(batch), batch, want)
        said = want - EXPERT_COLUMNS
        if len(inputs.states) == 0:
            shape, settings = inputs.shape, self.settings
            none: dict[str, Any] = {name: forwards.zeros(name, shape, batch, settings, self.device) for name in said}
            return Outputs(**none, **self.routers.columns(inputs, batch, want))
        found = forwards.per_state(self.model, inputs, said, self.settings, forwards.choices_of(batch, inputs, want))
        return forwards.outputs_of(found, inputs, batch, want, self.routers)

    def backward(self, share: Tensor) -> None:
        share.backward()

    def without_adapters(self) -> AbstractContextManager[None]:
        assert self.adapters is not None
        return self.adapters.off()

    def everyones(self, thing: Any) -> list[Any]:
        return [thing]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, param.detach()) for name, param in self.model.named_parameters())
        yield from forwards.stored_buffers(self.model).items()

    def save_state(self, path: Path) -> None:
        assert self.updater is not None
        torch.save(self.updater.state(), path / OPTIMIZER_FILE)

    def save_model(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        save_whole(self.model, path, weights)

    def load(self, path: Path) -> None:
        own = own_tensors(self.model, self.updater, self.adapters)
        if (path / SHARDS).is_dir():  # written by several ranks
            from paddock.engines.train.shards import load_shards  # takes a second to import

            load_shards(path / SHARDS, own, self.updater)
        else:
            self.load_whole(path, own)
        if self.updater is not None:
            self.updater.publish()

    def load_whole(self, path: Path, own: dict[str, Tensor]) -> None:
        """Reads what one process wrote."""
        stored = stored_weights(self.model, path, self.adapters)  # first: it says best that a model is another
        if self.updater is not None:
            self.updater.load_state(torch.load(path / OPTIMIZER_FILE, map_location=self.device, weights_only=True))
        for name, tensor in own.items():
            tensor.copy_(stored[name])
