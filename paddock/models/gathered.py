"""The unsharded model beside one whose weights are sharded over ranks: it holds the gathered weights for a rollout."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paddock.models.adapters import adapters_of
from paddock.models.experts import experts_of


class GatheredModel:
    """An unsharded copy of a sharded model, for rollouts. Its parameters are empty until `fill` sets them."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.params = dict(model.named_parameters())

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> GatheredModel:
        with torch.device("meta"):
            copied = type(model)(copy.deepcopy(model.config))
        if adapters := adapters_of(model):
            adapters.put_into(copied)
        experts_of(copied)  # known by the shapes of their parameters, which have none from here on
        empty_parameters(copied, device)
        for (name, module), own in zip(model.named_modules(), copied.modules(), strict=True):
            for key, buffer in module._buffers.items():
                own._buffers[key] = None if buffer is None else buffer.detach().clone().to(device)
                assert key in own._buffers, f"{name}.{key}"
        for name in ("generation_config", "_weight_conversions"):  # what transformers undoes when it saves
            if hasattr(model, name):
                setattr(copied, name, copy.copy(getattr(model, name)))
        return cls(copied.eval().requires_grad_(False))

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sets the parameters. Names are the model's own; a head tied to the embedding comes once."""
        for name, tensor in weights:
            if name in self.params:
                self.params[name].data = tensor

    def drop(self) -> None:
        for param in self.params.values():
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)


def empty_parameters(model: nn.Module, device: torch.device) -> None:
    """Replaces parameters on the meta device by ones without elements on `device`; tied parameters stay tied."""
    fresh: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                empty = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
                module._parameters[name] = fresh.setdefault(id(param), empty)
