"""The backend on megatron-core: ranks share matrices, layers, sequences and experts.

It gives the numbers of `single`: losses have the denominators of the whole mini-batch, gradients are summed over ranks,
and the optimizer is the same one, on masters that ranks may share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from paddock.config.engine import FrozenMegatronConfig, MegatronConfig, OptimConfig
from paddock.config.roles import LoraConfig
from paddock.core.batch import Batch
from paddock.core.device import compute_dtype
from paddock.core.processes import from_everyone, largest
from paddock.engines.train import forwards
from paddock.engines.train.base import Outputs, Placement, Want
from paddock.engines.train.megatron.decoder import Decoder
from paddock.engines.train.megatron.layout import Layout
from paddock.engines.train.megatron.lora import MegatronAdapters, attach
from paddock.engines.train.megatron.mapping import Mapping
from paddock.engines.train.megatron.optimizer import TIED, SharedUpdater
from paddock.engines.train.megatron.pipeline import Pipeline, Run
from paddock.engines.train.optim import Updater
from paddock.engines.train.routers import Routers
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.shards import BACKBONE, HEAD, save_gathered
from paddock.errors import UserError
from paddock.models.adapters import Adapters
from paddock.models.attention import Packed
from paddock.models.gathered import GatheredModel
from paddock.models.packing import Inputs
from paddock.models.ulysses import slice_of
from paddock.models.value_head import ValueModel

PARTS = "megatron"
"""Folder of a checkpoint with each rank's masters and optimizer state."""


class MegatronBackend:
    """See `Backend`. Ranks of one replica have the same rows."""

    name: ClassVar = "megatron"
    spans_ranks: ClassVar = True
    adapters: Adapters | None = None
    """None: Megatron's own are in `beside`."""

    def __init__(
        self,
        model: PreTrainedModel | ValueModel,
        settings: Settings,
        layout: Layout | None = None,
        device: torch.device | None = None,
        lora: LoraConfig | None = None,
    ):
        theirs = forwards.backbone_of(model)
        self.critic, self.settings = isinstance(model, ValueModel), settings
        self.layout, self.device = layout or Layout(), device or theirs.device
        self.layout.start(self.device)
        adapts = settings.optim is not None and lora is not None and bool(lora.rank or lora.adapter_path)
        dtype = settings.compute if adapts or settings.optim is None else settings.wide
        self.decoder = Decoder(theirs, self.layout, settings, dtype, self.device, self.critic)
        self.ranks = self.decoder.ranks
        self.mapping = Mapping(theirs, self.decoder)
        self.mapping.take(theirs.state_dict())
        if isinstance(model, ValueModel) and self.decoder.value_head is not None:
            self.decoder.value_head.load_state_dict(model.value_head.state_dict())
        self.gathered_model = GatheredModel.of(theirs, self.device)
        self.model = self.decoder.eval()
        self.beside: MegatronAdapters | None = None
        if lora is not None and adapts:
            section = "critic.model.lora" if self.critic else "actor_rollout_ref.model.lora"
            self.beside = attach(self.mapping, lora, section, self.layout, settings.wide)
            self.mapping.merged = self.beside.merged
        self.routers = Routers(theirs, None)
        self.pipeline = Pipeline(self.ranks.pipeline, self.device, settings.compute)
        self.share: Tensor | None = None
        """Share of the loss of the micro-batch that was yielded last, until the pipeline takes it."""
        self.updater: Updater | None = None
        if settings.optim is None:
            self.decoder.requires_grad_(False)
        else:
            self.updater = self.make_updater(settings.optim)
        self.decoder.config.params_dtype = settings.compute

    @classmethod
    def place(cls, model: Any, settings: Settings, placement: Placement) -> Self:
        keys, device = placement.megatron, placement.device
        layout = Layout.of(keys, f"{placement.section}.megatron")
        return cls(model, megatron_settings(settings, keys, device), layout, device, placement.lora)

    def make_updater(self, optim: OptimConfig) -> SharedUpdater:
        params = [(name.removeprefix("gpt."), param) for name, param in self.decoder.named_parameters()]
        narrow = {name: self.settings.compute for name, _ in params if not name.startswith(HEAD)}
        shared = self.mapping.tied and not self.critic and self.ranks.stages > 1
        tied = frozenset({TIED, "embedding.word_embeddings.weight"}) if shared else frozenset()
        spread = self.layout.spread_optimizer
        return SharedUpdater(params, optim, narrow, self.ranks, spread, tied, self.settings.total_steps)

    def parts(self, batch: Batch, budget: Budget) -> list[Tensor]:
        """See `Backend.parts`. All ranks meet the experts at once."""
        budget = replace(budget, tokens=budget.tokens * self.layout.context)
        return budget.split_into(batch, largest(budget.needed(batch), self.device))

    def inputs(self, batch: Batch) -> Inputs:
        """Packs the rows in slices of equal length; a rank without tokens gets one."""
        inputs = forwards.never_empty(batch, self.device)
        inputs = padded(inputs, -inputs.tokens.shape[1] % self.layout.slices)
        return slice_of(inputs, self.ranks.context) if self.layout.context > 1 else inputs

    def forward(self, micro_batches: list[Batch], want: Want) -> Iterator[tuple[Batch, Outputs]]:
        inputs = [self.inputs(micro) for micro in micro_batches]
        shapes = [self.decoder.shape(one) for one in inputs]

        def run(number: int, before: Tensor | None) -> Run[tuple[Batch, Outputs]]:
            states = self.decoder.states(inputs[number], before)
            if not self.ranks.last:
                return states
            micro = micro_batches[number]
            yield micro, self.outputs(states, inputs[number], micro, want)
            share, self.share = self.share, None
            return states if share is None else share

        if torch.is_grad_enabled():
            yield from self.pipeline.train(shapes, run)
        else:
            found = [outputs for _, outputs in self.pipeline.forward(shapes, run)]
            yield from zip(micro_batches, self.from_last_stage(found, micro_batches, want), strict=True)

    def outputs(self, states: Tensor, inputs: Inputs, micro: Batch, want: Want) -> Outputs:
        hidden = self.decoder.wanted(states, inputs)
        if self.critic:
            found = {"values": self.decoder.values(hidden)}
        else:
            choices = forwards.choices_of(micro, inputs, want)
            found = forwards.token_columns(hidden, self.decoder.head(), inputs, want, self.settings, choices)
        slices = self.ranks.context if self.layout.context > 1 else None
        return forwards.outputs_of(found, inputs, micro, want, self.routers, slices)

    def from_last_stage(self, found: list[Outputs], micro_batches: list[Batch], want: Want) -> Iterator[Outputs]:
        """Yields the outputs of each micro-batch on all stages; only the last stage has `found`."""
        rows = [len(micro) for micro in micro_batches]
        columns: dict[str, Any] = {}
        for name in sorted(want) if rows else ():
            shape = sum(rows), micro_batches[0].need("responses").shape[1]
            whole = forwards.zeros(name, shape, micro_batches[0], self.settings, self.device)
            if self.ranks.last:
                torch.cat([getattr(outputs, name).to(whole.dtype) for outputs in found], out=whole)
            columns[name] = self.broadcast(whole).split(rows)
        for number in range(len(rows)):
            yield Outputs(**{name: parts[number] for name, parts in columns.items()})

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Broadcasts the last stage's tensor along the pipeline."""
        if self.ranks.stages > 1:
            source = dist.get_global_rank(self.ranks.pipeline, self.ranks.stages - 1)
            dist.broadcast(tensor, source, group=self.ranks.pipeline)
        return tensor

    def backward(self, share: Tensor) -> None:
        self.share = share

    def without_adapters(self) -> AbstractContextManager[None]:
        assert self.beside is not None
        return self.beside.off()

    def everyones(self, thing: Any) -> list[Any]:
        """See `Backend.everyones`. The last stage of each replica speaks for it."""
        found = from_everyone(thing)
        return [found[rank] for rank in self.ranks.speakers()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.tensors`. Gathers one by one."""
        prefix = BACKBONE if self.critic else ""
        yield from ((prefix + name, tensor) for name, tensor in self.mapping.whole())
        if self.critic:
            head, hidden = self.decoder.value_head, self.decoder.config.hidden_size
            for name, shape in (("weight", (1, hidden)), ("bias", (1,))):
                tensor = (
                    torch.zeros(shape, device=self.device) if head is None else getattr(head, name).detach().clone()
                )
                yield HEAD + name, self.broadcast(tensor)

    def save_state(self, path: Path) -> None:
        """Writes each rank's masters and optimizer state."""
        assert self.updater is not None
        (path / PARTS).mkdir(exist_ok=True)
        state = {"layout": self.layout_of_state(), "masters": self.updater.named_masters()} | self.updater.state()
        torch.save(state, path / PARTS / f"rank_{dist.get_rank()}.pt")

    def save_model(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        save_gathered(path, self.gathered_model.model, weights, self.critic)

    def layout_of_state(self) -> list[int]:
        return [dist.get_world_size(), *(size or self.layout.tensor for size in self.layout.ranks),
                int(self.layout.spread_optimizer)]  # fmt: skip

    def load(self, path: Path) -> None:
        """Reads what `save_state` wrote in the same layout."""
        assert self.updater is not None, "the weights of this engine are frozen"
        file = path / PARTS / f"rank_{dist.get_rank()}.pt"
        state = torch.load(file, map_location=self.device, weights_only=True) if file.is_file() else {}
        if state.get("layout") != self.layout_of_state():
            raise UserError(
                f"the checkpoint {path} was written by another layout: its optimizer state is in other parts",
                key="trainer.resume_mode",
                fix="resume with the devices and megatron sizes it was made with; or trainer.resume_mode=disable and "
                f"actor_rollout_ref.model.path={path}, which any layout starts from",
            )
        for name, master in self.updater.named_masters().items():
            master.copy_(state["masters"][name])
        self.updater.load_state(state)
        self.updater.publish()


def padded(inputs: Inputs, padding: int) -> Inputs:
    """Appends a sequence of padding to the packed ones."""
    if padding == 0:
        return inputs
    assert inputs.packed is not None
    extra = torch.arange(padding, device=inputs.tokens.device)
    return replace(
        inputs,
        tokens=torch.cat([inputs.tokens, torch.zeros_like(extra)[None]], 1),
        positions=torch.cat([inputs.positions, extra[None]], 1),
        packed=Packed([*inputs.packed.lengths, padding], inputs.packed.device),
        cells=torch.cat([inputs.cells, extra * 0 - 1]),
    )


def megatron_settings(settings: Settings, keys: FrozenMegatronConfig, device: torch.device) -> Settings:
    """Replaces what the keys of FSDP say by what those of Megatron say."""
    return replace(
        settings,
        compute=compute_dtype(keys.dtype, device),
        wide=torch.float32 if settings.optim is not None else compute_dtype(keys.dtype, device),
        deterministic=False,
        offload_params=keys.param_offload,
        offload_optimizer=isinstance(keys, MegatronConfig) and keys.optimizer_offload,
    )
