"""The training engine on megatron-core: ranks share matrices, layers, sequences and experts.

It gives the numbers of `single`: losses have the denominators of the whole mini-batch, gradients are summed over ranks,
and the optimizer is the same one, on masters that ranks may share.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from paddock.config.engine import FrozenMegatronConfig, MegatronConfig, OptimConfig
from paddock.config.refusals import megatron_beside_other_keys
from paddock.config.roles import LoraConfig
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.device import compute_dtype, device_of
from paddock.core.processes import from_everyone, largest
from paddock.engines.train.base import LossFn, Outputs, Want, join_shares
from paddock.engines.train.megatron.decoder import Decoder
from paddock.engines.train.megatron.layout import Layout
from paddock.engines.train.megatron.lora import Adapters, attach
from paddock.engines.train.megatron.mapping import Mapping
from paddock.engines.train.megatron.optimizer import TIED, SharedUpdater
from paddock.engines.train.megatron.pipeline import Pipeline
from paddock.engines.train.offload import at_home
from paddock.engines.train.routers import Routers
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.shards import save_streamed
from paddock.engines.train.single import M, SingleEngine
from paddock.errors import UserError
from paddock.models.attention import Packed
from paddock.models.gathered import GatheredModel
from paddock.models.load import load_config
from paddock.models.packing import Inputs, pack
from paddock.models.token_stats import token_stats
from paddock.models.ulysses import SumOfSlices, slice_of
from paddock.models.value_head import HEAD_FILE, ValueModel

log = logging.getLogger(__name__)

PARTS = "megatron"
"""Folder of a checkpoint with each rank's masters and optimizer state."""
HEAD, BACKBONE = "value_head.", "backbone."


class MegatronEngine(SingleEngine):
    """See `TrainEngine`. Every rank calls every method; ranks of one replica with the same rows."""

    updater: SharedUpdater | None

    def __init__(
        self,
        model: PreTrainedModel | ValueModel,
        settings: Settings,
        layout: Layout | None = None,
        device: torch.device | None = None,
        keys: MegatronConfig | None = None,
        lora: LoraConfig | None = None,
    ):
        self.critic = isinstance(model, ValueModel)
        theirs: PreTrainedModel = model.backbone if isinstance(model, ValueModel) else model
        self.layout, self.device = layout or Layout(), device or theirs.device
        self.layout.start(self.device)
        if keys is not None:
            settings = megatron_settings(settings, keys, self.device)
        self.settings = settings
        beside = settings.optim is not None and lora is not None and bool(lora.rank or lora.adapter_path)
        dtype = settings.compute if beside or settings.optim is None else settings.wide
        self.decoder = Decoder(theirs, self.layout, settings, dtype, self.device, self.critic)
        self.ranks = self.decoder.ranks
        self.mapping = Mapping(theirs, self.decoder)
        self.mapping.take(theirs.state_dict())
        if isinstance(model, ValueModel) and self.decoder.value_head is not None:
            self.decoder.value_head.load_state_dict(model.value_head.state_dict())
        self.twin = GatheredModel.of(theirs, self.device)
        self.model: Any = self.decoder.eval()
        self.backbone = self.twin.model
        self.adapters, self.adapters_off = None, False  # peft's; Megatron's own are in `beside`
        self.beside: Adapters | None = None
        if lora is not None and beside:
            section = "critic.model.lora" if self.critic else "actor_rollout_ref.model.lora"
            self.beside = attach(self.mapping, lora, section, self.layout, settings.wide, self.layout.seed)
            self.mapping.adapters = self.beside
        self.routers = Routers(self.backbone, None)
        self.pipeline = Pipeline(self.ranks.pipeline, self.device, settings.compute)
        self.updater = None
        if settings.optim is None:
            self.decoder.requires_grad_(False)
        else:
            self.updater = self.make_updater(settings.optim)
        if self.device.type != "cpu":
            self.offload_idle(self.device)
        self.decoder.config.params_dtype = settings.compute

    @classmethod
    def for_actor(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        megatron_beside_other_keys(config)
        if not config.actor_rollout_ref.model.use_remove_padding:
            log.warning("use_remove_padding=False has no effect: Megatron's layers always get packed sequences")
        return super().for_actor(config, total_steps, **cls.place(config, "actor"))

    @classmethod
    def for_reference(cls, config: Config, **place: Any) -> Self:
        return super().for_reference(config, **cls.place(config, "ref"))

    @classmethod
    def for_critic(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        return super().for_critic(config, total_steps, **cls.place(config, "critic"))

    @classmethod
    def read(cls, loader: Callable[..., M], source: dict[str, Any], dtype: torch.dtype, device: torch.device) -> M:
        """As the file has it, mapped: the ranks of a machine share its pages, and each then takes its part."""
        stored = load_config(**source).dtype
        return loader(**source, dtype=stored if isinstance(stored, torch.dtype) else dtype, device="cpu")

    def make_updater(self, optim: OptimConfig) -> SharedUpdater:
        params = [(name.removeprefix("gpt."), param) for name, param in self.decoder.named_parameters()]
        narrow = {name: self.settings.compute for name, _ in params if not name.startswith(HEAD)}
        shared = self.mapping.tied and not self.critic and self.ranks.stages > 1
        tied = frozenset({TIED, "embedding.word_embeddings.weight"}) if shared else frozenset()
        spread = self.layout.spread_optimizer
        return SharedUpdater(params, optim, narrow, self.ranks, spread, tied, self.settings.total_steps)

    def parts(self, batch: Batch, budget: Budget) -> list[Tensor]:
        """As many on every rank as the one that needs most of them: experts are met by all at once."""
        budget = replace(budget, tokens=budget.tokens * self.layout.context)
        return budget.split_into(batch, largest(budget.needed(batch), self.device))

    def why_prompts_are_not_shared(self) -> str | None:
        return "Megatron computes each row alone"

    def inputs(self, batch: Batch) -> Inputs:
        """Packed, in slices of equal length; with one token at least, where nothing is asked."""
        width = batch.need("responses").shape[1]
        inputs = pack(batch, self.device) if len(batch) else None
        if inputs is None or inputs.tokens.numel() == 0:
            inputs = self.one_token((len(batch), width))
        inputs = padded(inputs, -inputs.tokens.shape[1] % self.layout.slices)
        return slice_of(inputs, self.ranks.context) if self.layout.context > 1 else inputs

    def one_token(self, shape: tuple[int, int]) -> Inputs:
        """Returns the input of a rank that has no rows."""
        none, zero = (torch.zeros(size, dtype=torch.long, device=self.device) for size in ((0,), (1, 1)))
        return Inputs(zero, zero, Packed([1], self.device), None, states=none, targets=none, places=none, shape=shape,
                      cells=zero[0] - 1)  # fmt: skip

    def without_adapters(self, budget: Budget) -> Self:
        """The frozen model under this one's adapters, with micro-batches of its own: no second one in memory."""
        assert self.beside is not None
        other = copy.copy(self)
        other.settings = replace(self.settings, optim=None, forward_budget=budget)
        other.updater, other.adapters_off = None, True
        return other

    def forward(self, batch: Batch, want: Want) -> Outputs:
        with self.beside.off() if self.beside and self.adapters_off else nullcontext():
            return self.found(batch, want)

    @torch.no_grad()
    def found(self, batch: Batch, want: Want) -> Outputs:
        parts = self.parts(batch, self.settings.forward_budget)
        inputs = [self.inputs(batch.rows(part)) for part in parts]
        shape = len(batch), batch.need("responses").shape[1]
        columns = {name: torch.zeros(shape, device=self.device) for name in sorted(want)}

        def step(number: int, before: Tensor | None) -> Tensor:
            states = self.decoder.states(inputs[number], before)
            if self.ranks.last:
                outputs = self.columns(states, inputs[number], want)
                for name, column in columns.items():
                    column[parts[number].to(self.device)] = outputs[name].to(column.dtype)
            return states

        self.pipeline.forward([self.decoder.shape(one) for one in inputs], step)
        if self.ranks.stages > 1:
            source = dist.get_global_rank(self.ranks.pipeline, self.ranks.stages - 1)
            for column in columns.values():
                dist.broadcast(column, source, group=self.ranks.pipeline)
        found: dict[str, Any] = {name: column.to(batch.row.device) for name, column in columns.items()}
        return Outputs(**found)

    def backward(self, micro_batches: list[Batch], loss: LossFn, want: Want) -> dict[str, Tensor]:
        """Sums of metrics are the last stage's; the others have zeros of no name."""
        inputs = [self.inputs(micro) for micro in micro_batches]
        sums: dict[str, Tensor] = {"loss": torch.zeros((), dtype=torch.float64, device=self.device)}

        def step(number: int, before: Tensor | None) -> Tensor:
            states = self.decoder.states(inputs[number], before)
            if not self.ranks.last:
                return states
            outputs = Outputs(**self.columns(states, inputs[number], want))
            share, metrics = self.loss_share(micro_batches[number], outputs, loss, want)
            self.add_up(sums, {"loss": share.detach()} | metrics)
            return share

        self.pipeline.train([self.decoder.shape(one) for one in inputs], step)
        return sums

    def loss_share(self, micro: Batch, outputs: Outputs, loss: LossFn, want: Want) -> tuple[Tensor, dict[str, Tensor]]:
        """A rank without rows, or without a token that counts, computes with the others all the same."""
        touched = self.nothing(outputs, want)
        if len(micro) == 0:
            return touched, {}
        share, metrics = loss(micro.to(self.device), outputs)
        return share if share.requires_grad else share + touched, metrics

    def nothing(self, outputs: Outputs, want: Want) -> Tensor:
        """Returns 0 times the outputs: a rank in whose rows nothing counts runs backward with the others."""
        return torch.stack([getattr(outputs, name).sum() for name in sorted(want)]).sum() * 0.0

    def columns(self, states: Tensor, inputs: Inputs, want: Want) -> dict[str, Any]:
        hidden = self.decoder.wanted(states, inputs)
        if self.critic:
            found = {"values": self.decoder.values(hidden)}
        else:
            stats = token_stats(
                hidden,
                self.decoder.head(),
                inputs.targets,
                self.settings.temperature,
                entropy="entropy" in want,
                sum_pi_squared="sum_pi_squared" in want,
            )
            found = {name: getattr(stats, name) for name in want}
        columns = {name: inputs.per_token(found[name]) for name in sorted(want)}
        if self.layout.context > 1:
            columns = {name: SumOfSlices.apply(column, self.ranks.context) for name, column in columns.items()}
        return columns

    def numbers(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Of all replicas, as their last stages have them. The norm is everyone's already."""
        norm = sums.pop("grad_norm")
        total: dict[str, float] = {}
        for shares in self.everyones(super().numbers(sums)):
            for name, value in shares.items():
                total[name] = join_shares(name, total[name], value) if name in total else value
        return total | {"grad_norm": float(norm)}

    def everyones(self, thing: Any) -> list[Any]:
        found = from_everyone(thing)
        return [found[rank] for rank in self.ranks.speakers()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one by one, in the type the model computes in; every rank must read to the end."""
        prefix = BACKBONE if self.critic else ""
        yield from ((prefix + name, tensor) for name, tensor in self.mapping.whole())
        if self.critic:
            yield from ((HEAD + name, tensor) for name, tensor in self.value_head().items())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors()

    def value_head(self) -> dict[str, Tensor]:
        head, hidden = self.decoder.value_head, self.decoder.config.hidden_size
        found = {"weight": torch.zeros(1, hidden), "bias": torch.zeros(1)}
        for name, zeros in found.items():
            tensor = zeros.to(self.device) if head is None else getattr(head, name).detach().clone()
            if self.ranks.stages > 1:
                source = dist.get_global_rank(self.ranks.pipeline, self.ranks.stages - 1)
                dist.broadcast(tensor, source, group=self.ranks.pipeline)
            found[name] = tensor
        return found

    @property
    def rollout_model(self) -> PreTrainedModel:
        """A plain module that holds the weights while they are gathered, and no memory else."""
        return self.twin.model

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self.twin.fill(self.tensors())
        try:
            yield
        finally:
            self.twin.drop()

    @at_home
    def save(self, path: Path) -> None:
        """Each rank's masters and optimizer state; and the model as `transformers` loads it, by rank 0."""
        path.mkdir(parents=True, exist_ok=True)
        if self.updater is not None:
            (path / PARTS).mkdir(exist_ok=True)
            state = {"layout": self.place_of_state(), "masters": self.updater.named_masters()} | self.updater.state()
            torch.save(state, path / PARTS / f"rank_{dist.get_rank()}.pt")
        writes = dist.get_rank() == 0
        save_streamed(path, self.twin.model, self.mapping.whole(), writes)
        head = {name: tensor.cpu() for name, tensor in self.value_head().items()} if self.critic else {}
        if writes and head:
            save_file(head, path / HEAD_FILE)
        dist.barrier()

    def place_of_state(self) -> list[int]:
        return [dist.get_world_size(), *(size or self.layout.tensor for size in self.layout.ranks),
                int(self.layout.spread_optimizer)]  # fmt: skip

    @at_home
    @torch.no_grad()
    def load(self, path: Path) -> None:
        """What `save` wrote in the same layout: from there training goes on as if it had not stopped."""
        assert self.updater is not None, "the weights of this engine are frozen"
        self.all_changes()
        file = path / PARTS / f"rank_{dist.get_rank()}.pt"
        state = torch.load(file, map_location=self.device, weights_only=True) if file.is_file() else {}
        if state.get("layout") != self.place_of_state():
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

    @classmethod
    def place(cls, config: Config, role: Literal["actor", "ref", "critic"]) -> dict[str, Any]:
        section = "critic" if role == "critic" else f"actor_rollout_ref.{role}"
        keys: FrozenMegatronConfig = (
            config.critic if role == "critic" else getattr(config.actor_rollout_ref, role)
        ).megatron
        device = device_of(config.trainer.device)
        model = config.critic.model if role == "critic" else config.actor_rollout_ref.model
        lora = None if role == "ref" else model.lora
        return {"layout": Layout.of(keys, f"{section}.megatron"), "device": device, "keys": keys, "lora": lora}


def padded(inputs: Inputs, padding: int) -> Inputs:
    """A last sequence of padding."""
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
    """What FSDP's keys say in the other engines, Megatron's say here."""
    return replace(
        settings,
        compute=compute_dtype(keys.dtype, device),
        wide=torch.float32 if settings.optim is not None else compute_dtype(keys.dtype, device),
        deterministic=False,
        offload_params=keys.param_offload,
        offload_optimizer=isinstance(keys, MegatronConfig) and keys.optimizer_offload,
    )
