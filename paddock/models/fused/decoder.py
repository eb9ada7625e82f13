"""A decoder's forward in few kernels, over its modules' own parameters: training, prefill and decode alike.

transformers' modules launch about forty small kernels a layer. Here the projections that read the same input are one
product, and norms, rotations and activations one pass over memory each. Numbers are rounded when they are stored, and
the stream between layers is float32: two ways to compute the same are less far apart (benchmarks/roundings.py). Which
layers are there, how they scale, cap and slide is read off one forward of the modules themselves, and layers are
compared with theirs: a model that does anything else keeps its modules' forward (see probe.py). There is no file a
family.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paddock.kernels.launch import can_launch
from paddock.models.attention import NAME, Attention, Packed
from paddock.models.forward import FUSED
from paddock.models.fused.joined import Joined, Unfit
from paddock.models.fused.layer import Layer, Norm, SharedInput
from paddock.models.fused.probe import TOLERANCE, apart, compare_layer, watch

PROBE = 24  # tokens of the forward that is compared


def fuse(model: PreTrainedModel, exact: bool = False, keep_apart: bool = False) -> str | None:
    """Gives the model a fused forward, which `hidden_states` then takes; or returns why it cannot have one.

    `exact`: a token's numbers then do not depend on what is computed beside it, in training, prefill or decode.
    `keep_apart`: trained adapters get memory of their own, as weights that are offloaded need it; see `Joined`.
    """
    try:
        vars(model.base_model)[FUSED] = FusedDecoder(model, exact, keep_apart)
    except Unfit as reason:
        return str(reason)
    return None


def fused(model: PreTrainedModel) -> FusedDecoder | None:
    return vars(model.base_model).get(FUSED)


class FusedDecoder:
    """See the module's text. Raises `Unfit` for a model that it would not compute right."""

    def __init__(self, model: PreTrainedModel, exact: bool = False, keep_apart: bool = False):
        self.exact, self.keep_apart = exact, keep_apart
        self.backbone: Any = model.base_model
        config = model.config.get_text_config()
        weight = next(model.parameters())
        self.on_cpu = weight.device.type == "cpu" and not can_launch(weight)
        if not self.on_cpu and not can_launch(weight):
            raise Unfit("its kernels need triton and a GPU")
        if model.config._attn_implementation != NAME:
            raise Unfit("it was loaded with another attention")
        if self.on_cpu and (exact or weight.dtype not in TOLERANCE):
            raise Unfit("exact numerics need a GPU" if exact else f"its weights are {weight.dtype}")
        missing = [
            name for name in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(self.backbone, name)
        ]
        if missing:
            raise Unfit(f"its backbone has no {missing[0]}")
        if getattr(config, "attention_dropout", 0.0):
            raise Unfit("its attention drops keys in training")
        self.scale = 1.0
        takes_type = "layer_type" in inspect.signature(self.backbone.rotary_emb.forward).parameters
        types = getattr(config, "layer_types", None)
        self.rope_types = list(types) if takes_type and types else [None] * len(self.backbone.layers)
        self.probe(model)
        if self.on_cpu:
            self.leave_file(model)

    @torch.no_grad()
    def probe(self, model: PreTrainedModel) -> None:
        device = next(model.parameters()).device
        tokens = torch.arange(PROBE, device=device).remainder(model.config.get_text_config().vocab_size)[None]
        positions = torch.arange(PROBE, device=device)[None]
        watched = watch(model, self.backbone.layers, tokens, positions)
        scores, embedded, end = watched.scores, self.backbone.embed_tokens(tokens), watched.end
        self.norm = Norm.of(self.backbone.norm)
        self.layers = [
            Layer(layer, scores[i], self.exact, self.keep_apart) for i, layer in enumerate(self.backbone.layers)
        ]
        adapters = [joined.adapters for joined in self.products]
        self.pairs = [pair for beside in adapters if beside for pair in beside.pairs]
        scales = (1.0, float(embedded.shape[-1] ** 0.5))
        fitting = [s for s in scales if apart(embedded * s, watched.calls[0].given) <= TOLERANCE[embedded.dtype]]
        if not fitting:
            raise Unfit("something happens before its layers")
        self.scale = fitting[0]
        last = self.norm(watched.calls[-1].gave.flatten(0, 1), None, end.dtype)[0].view_as(end)
        if apart(last, end) > TOLERANCE[end.dtype]:
            raise Unfit("something happens behind its layers")
        shared = self.shared(embedded, positions, Packed([PROBE], device))
        kinds = {(scores[i], kind): i for i, kind in enumerate(self.rope_types)}
        for (asked, kind), i in kinds.items():
            compare_layer(watched.calls[i], asked, shared[kind], self.exact)

    @property
    def products(self) -> list[Joined]:
        return [joined for layer in self.layers for joined in layer.joined]

    @torch.no_grad()
    def leave_file(self, model: PreTrainedModel) -> None:
        """Copies weights that are mapped from a file: beside those that were joined, it would stay in memory whole."""
        moved = {p for joined in self.products if len(joined.layers) > 1 for p in joined.parameters}
        moved |= {p for pair in self.pairs for p in (pair.a, pair.b)}
        for parameter in model.parameters():
            if parameter not in moved:
                parameter.data = parameter.data.clone()
        for joined in self.products:
            joined.refresh()

    def hidden(self, tokens: Tensor, positions: Tensor, how: Attention) -> Tensor:
        """``[N, L] -> [N, L, hidden]``, as `hidden_states`."""
        embedded = self.backbone.embed_tokens(tokens)
        if self.scale != 1.0:
            embedded = embedded * torch.tensor(self.scale, dtype=embedded.dtype)
        shared = self.shared(embedded, positions, how)
        residual = embedded.flatten(0, 1).float()  # wide: what layers add to it is not rounded away
        branch: Tensor | None = None
        recompute = self.backbone.gradient_checkpointing and self.backbone.training
        for layer, kind in zip(self.layers, self.rope_types, strict=True):
            residual, branch = layer(residual, branch, shared[kind], recompute)
        assert branch is not None, "it has no layers"
        return self.norm.last(residual, branch, embedded.dtype).view(*tokens.shape, -1)

    def shared(self, embedded: Tensor, positions: Tensor, how: Attention) -> dict[str | None, SharedInput]:
        adapted = not (self.pairs and self.pairs[0].is_off)  # they are on or off together
        shape = embedded.shape[0], embedded.shape[1]
        turns = {kind: self.rope(embedded, positions, kind) for kind in set(self.rope_types)}
        return {kind: SharedInput(*turn, how, shape, adapted) for kind, turn in turns.items()}

    def rope(self, like: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        found = self.backbone.rotary_emb(like, positions, *([] if kind is None else [kind]))
        cos, sin = (x.expand(*positions.shape, -1).flatten(0, 1).contiguous() for x in found)
        if cos.shape[1] != self.layers[0].dim:
            raise Unfit("a part of its heads is not rotated")
        return cos, sin
