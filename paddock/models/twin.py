"""A plain module beside one whose weights are spread over ranks: empty, until the weights are gathered into it."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paddock.models.adapters import adapters_of


class Twin:
    """Same class, config and buffers. It takes no memory but while it is filled, for a rollout."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.params = dict(model.named_parameters())

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device) -> Twin:
        with torch.device("meta"):
            twin = type(model)(copy.deepcopy(model.config))
        if adapters := adapters_of(model):
            adapters.put_into(twin)
        empty_parameters(twin, device)
        for (name, module), own in zip(model.named_modules(), twin.modules(), strict=True):
            for key, buffer in module._buffers.items():
                own._buffers[key] = None if buffer is None else buffer.detach().clone().to(device)
                assert key in own._buffers, f"{name}.{key}"
        for name in ("generation_config", "_weight_conversions"):  # what transformers undoes when it saves
            if hasattr(model, name):
                setattr(twin, name, copy.copy(getattr(model, name)))
        return cls(twin.eval().requires_grad_(False))

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Names are the model's own; a head tied to the embedding comes once."""
        for name, tensor in weights:
            if name in self.params:
                self.params[name].data = tensor

    def drop(self) -> None:
        for param in self.params.values():
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)


def empty_parameters(model: nn.Module, device: torch.device) -> None:
    """Parameters without elements in place of those that are only shapes; what was tied stays tied."""
    fresh: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                empty = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
                module._parameters[name] = fresh.setdefault(id(param), empty)
