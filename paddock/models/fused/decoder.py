"""A decoder's forward in few kernels, over its modules' own parameters: training, prefill and decode on a GPU alike.

transformers' modules launch about forty small kernels a layer. Here the projections that read the same input are one
product, and norms, rotations and activations one pass over memory each. Roundings are those of the modules, but the
stream between layers is float32, which halves the gap between two ways to compute the same. Which layers are there, how
they scale, cap and slide is read off one forward of the modules themselves, and the result is compared with it: a
model that does anything else keeps its modules' forward. There is no file a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paddock.kernels.launch import can_launch
from paddock.models.attention import FUSED, NAME, Attention, Packed, module_states
from paddock.models.fused.joined import Joined, Unfit
from paddock.models.fused.layer import Layer, Norm, Scores, Shared

PROBE = 24  # tokens of the forward that is compared
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def fuse(model: PreTrainedModel, exact: bool = False) -> str | None:
    """Gives the model a fused forward, which `hidden_states` then takes; or returns why it cannot have one.

    `exact`: a token's numbers then do not depend on what is computed beside it, in training, prefill or decode.
    """
    try:
        vars(model.base_model)[FUSED] = FusedDecoder(model, exact)
    except Unfit as reason:
        return str(reason)
    return None


def fused(model: PreTrainedModel) -> FusedDecoder | None:
    return vars(model.base_model).get(FUSED)


class Recorder(Packed):
    """Attends as `Packed`, and notes how each layer asked for it."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        super().__init__(lengths, device)
        self.seen: dict[int, Scores] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if sinks is not None:
            raise Unfit("its attention has sinks")
        self.seen[int(module.layer_idx)] = Scores(scaling, window, softcap)  # type: ignore[arg-type]
        return super().attend(module, query, key, value, scaling, window, softcap)


class FusedDecoder:
    """See the module's text. Raises `Unfit` for a model that it would not compute right."""

    def __init__(self, model: PreTrainedModel, exact: bool = False):
        self.exact = exact
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
        recorder = Recorder([PROBE], device)
        wanted = module_states(model, tokens, positions, recorder)
        if sorted(recorder.seen) != list(range(len(self.backbone.layers))):
            raise Unfit("not all of its layers attend")
        self.norm = Norm.of(self.backbone.norm)
        self.layers = [Layer(layer, recorder.seen[i], self.exact) for i, layer in enumerate(self.backbone.layers)]
        adapters = [joined.adapters for joined in self.products]
        self.pairs = [pair for beside in adapters if beside for pair in beside.pairs]
        tolerance = TOLERANCE[wanted.dtype] * (2 if self.on_cpu else 1)  # its stream is as narrow as the modules'
        gaps = []
        for scale in (1.0, float(self.backbone.embed_tokens.weight.shape[1] ** 0.5)):
            self.scale = scale
            found = self.hidden(tokens, positions, Packed([PROBE], device))
            gaps.append(float((found.double() - wanted.double()).norm() / wanted.double().norm()))
            if gaps[-1] <= tolerance:
                return
        raise Unfit(f"its own forward gives other numbers ({min(gaps):.1e} apart)")

    @property
    def products(self) -> list[Joined]:
        return [joined for layer in self.layers for joined in layer.joined]

    @torch.no_grad()
    def leave_file(self, model: PreTrainedModel) -> None:
        """Weights that are still mapped from a file: beside those that were joined, it would stay in memory whole."""
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
        adapted = not (self.pairs and self.pairs[0].is_off)  # they are on or off together
        shape = tokens.shape[0], tokens.shape[1]
        turns = {kind: self.rope(embedded, positions, kind) for kind in set(self.rope_types)}
        shared = {kind: Shared(*turn, how, shape, adapted) for kind, turn in turns.items()}
        residual = embedded.flatten(0, 1)
        if not self.on_cpu:  # wide: what layers add to it is not rounded away; on a CPU, that takes longer
            residual = residual.float()
        branch: Tensor | None = None
        recompute = self.backbone.gradient_checkpointing and self.backbone.training
        for layer, kind in zip(self.layers, self.rope_types, strict=True):
            residual, branch = layer(residual, branch, shared[kind], recompute)
        assert branch is not None, "it has no layers"
        return self.norm.last(residual, branch, embedded.dtype).view(*tokens.shape, -1)

    def rope(self, like: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        found = self.backbone.rotary_emb(like, positions, *([] if kind is None else [kind]))
        cos, sin = (x.expand(*positions.shape, -1).flatten(0, 1).contiguous() for x in found)
        if cos.shape[1] != self.layers[0].dim:
            raise Unfit("a part of its heads is not rotated")
        return cos, sin
