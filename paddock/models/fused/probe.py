"""One forward of a model's own modules, call by call, and one of its layers copied to float32 beside the fused one.

The ends of two whole forwards would say little: in bfloat16 that of a real model may be a third away from its own in
float32, since its modules round the stream between layers, and the fused forward does not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from paddock.models.attention import Packed, Scores
from paddock.models.attention.interface import layer_of
from paddock.models.forward import module_states
from paddock.models.fused.joined import Unfit
from paddock.models.fused.layer import Layer, SharedInput

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Between two ways to the same numbers, with no layer between them."""


class Recorder(Packed):
    """Attends as `Packed`, and notes how each layer asked for it."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        super().__init__(lengths, device)
        self.seen: dict[int, Scores] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        if scores.sinks is not None:
            raise Unfit("its attention has sinks")
        self.seen[layer_of(module)] = scores
        return super().attend(module, query, key, value, scores)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """What a layer was given, and what it made of it: ``[1, T, hidden]``."""

    layer: nn.Module
    given: Tensor
    others: tuple[Any, ...]
    named: dict[str, Any]
    gave: Tensor


@dataclass(frozen=True, eq=False)
class WatchedModule:
    calls: list[ModuleCall]
    scores: dict[int, Scores]
    end: Tensor
    """The last hidden states."""


def watch(model: PreTrainedModel, layers: nn.ModuleList, tokens: Tensor, positions: Tensor) -> WatchedModule:
    calls: list[ModuleCall] = []

    def note(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], gave: Any) -> None:
        first, others = (given[0], given[1:]) if given else (named["hidden_states"], ())
        named = {name: value for name, value in named.items() if name != "hidden_states"}
        calls.append(ModuleCall(layer, first, others, named, gave[0] if isinstance(gave, tuple) else gave))

    recorder = Recorder([tokens.shape[1]], tokens.device)
    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        end = module_states(model, tokens, positions, recorder)
    finally:
        for hook in hooks:
            hook.remove()
    if sorted(recorder.seen) != list(range(len(layers))) or [call.layer for call in calls] != list(layers):
        raise Unfit("not all of its layers attend")
    if not all(torch.equal(one.gave, other.given) for one, other in pairwise(calls)):
        raise Unfit("something happens between its layers")
    return WatchedModule(calls, recorder.seen, end)


def compare_layer(call: ModuleCall, scores: Scores, shared: SharedInput, exact: bool) -> None:
    """Compares what the layer adds to the stream with its module, in float32."""
    module = copy.deepcopy(call.layer).float()
    given, others, named = tree_map(wide, (call.given, call.others, call.named))
    wanted = module(given, *others, **named)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    turned = SharedInput(shared.cos.float(), shared.sin.float(), shared.how, shared.shape, shared.adapted)
    found = sum(Layer(module, scores, exact).forward(given.flatten(0, 1), None, turned, None))
    gap = apart(found.view_as(wanted) - given, wanted - given)  # type: ignore[union-attr]
    if gap > TOLERANCE[torch.float32]:
        raise Unfit(f"its own forward gives other numbers ({gap:.1e} apart)")


def wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
