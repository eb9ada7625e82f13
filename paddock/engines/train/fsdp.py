"""The training engine for many devices, FSDP2: a rank keeps a share of every weight and gathers what it computes with.

Ranks work on different rows or, with Ulysses, on slices of the same ones. Losses have the denominators of the whole
mini-batch, so gradients are summed over ranks, not averaged; and all ranks run the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from paddock.config.engine import FSDPConfig, OptimConfig, ShardedConfig
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.device import DTYPES, device_of
from paddock.core.processes import from_everyone, largest, subgroups
from paddock.engines.train.base import EXPERT_COLUMNS, SHARDS, Outputs, Want, join_shares
from paddock.engines.train.offload import at_home
from paddock.engines.train.optim import Updater
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.shards import copy_into, load_shards, save_shards, save_streamed
from paddock.engines.train.single import OPTIMIZER_FILE, M, SingleEngine, per_state
from paddock.errors import UserError
from paddock.models.adapters import MERGED
from paddock.models.attention import Packed
from paddock.models.gathered import GatheredModel
from paddock.models.load import load_config
from paddock.models.packing import Inputs, images_of
from paddock.models.ulysses import SumOfSlices, joined_slices, require_divisible_heads, slice_of
from paddock.models.value_head import HEAD_FILE, ValueModel
from paddock.models.vision import blank, tower_of

HEAD, BACKBONE = "value_head.", "backbone."


@dataclass(frozen=True)
class Shards:
    """How weights are spread over ranks, and sequences over groups of them."""

    size: int = -1
    """Ranks that share one copy of the weights; -1: all."""
    reshard: bool = True
    prefetch: bool = False
    offload: bool = False
    reduce: torch.dtype = torch.float32
    sequence: int = 1
    """Ranks that share each sequence."""
    key: str = "actor_rollout_ref.actor"
    """Section of the role, for errors."""

    @classmethod
    def of(cls, config: ShardedConfig, sequence: int, key: str) -> Shards:
        reduce = config.mixed_precision.reduce_dtype if isinstance(config, FSDPConfig) else "fp32"
        return cls(config.fsdp_size, config.reshard_after_forward, config.forward_prefetch, config.offload_policy,
                   DTYPES[reduce], sequence, key)  # fmt: skip


class Network(nn.Module):
    """Everything that reads parameters, in one forward: around it FSDP gathers what belongs to no layer."""

    def __init__(self, model: PreTrainedModel | ValueModel, temperature: float):
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, inputs: Inputs, want: Want) -> dict[str, Tensor]:
        found = per_state(self.model, inputs, want, self.temperature)
        return {name: value.clone() if value._is_view() else value for name, value in found.items()}  # FSDP hooks them


class ShardedUpdater(Updater):
    """Masters are shares of the weights; the copies that the model computes with are FSDP's business."""

    def clip(self) -> Tensor:
        norm = super().clip()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class FSDPEngine(SingleEngine):
    """See `TrainEngine`. Every rank calls every method, with rows of its own, and all get the same numbers."""

    def __init__(
        self,
        model: PreTrainedModel | ValueModel,
        settings: Settings,
        shards: Shards | None = None,
        device: torch.device | None = None,
    ):
        self.shards = shards or Shards()
        backbone = model.backbone if isinstance(model, ValueModel) else model
        device = device or backbone.device
        self.sequence = self.sequence_group(backbone, settings)
        self.twin = GatheredModel.of(backbone, device)
        self.network = Network(model, settings.temperature)
        self.spread(model, settings, device)
        super().__init__(model, settings)
        self.device = device  # parameters may live elsewhere
        self.tower, self.sees = tower_of(backbone) is not None, False
        if self.tower and not settings.packed:
            raise UserError(
                "beside images, ranks share packed rows only",
                key=f"{self.shards.key}: model.use_remove_padding",
                value=False,
                fix="leave it at True",
            )

    @classmethod
    def for_actor(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor"
        shards = Shards.of(actor.fsdp_config, actor.ulysses_sequence_parallel_size, key)
        return super().for_actor(config, total_steps, shards=shards, device=device_of(config.trainer.device))

    @classmethod
    def for_reference(cls, config: Config, **place: Any) -> Self:
        ref, key = config.actor_rollout_ref.ref, "actor_rollout_ref.ref"
        shards = Shards.of(ref.fsdp_config, ref.ulysses_sequence_parallel_size, key)
        return super().for_reference(config, shards=shards, device=device_of(config.trainer.device))

    @classmethod
    def for_critic(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        critic = config.critic
        shards = Shards.of(critic.model.fsdp_config, critic.ulysses_sequence_parallel_size, "critic")
        return super().for_critic(config, total_steps, shards=shards, device=device_of(config.trainer.device))

    @classmethod
    def for_pairs(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor"
        shards = Shards.of(actor.fsdp_config, actor.ulysses_sequence_parallel_size, key)
        return super().for_pairs(config, total_steps, shards=shards, device=device_of(config.trainer.device))

    @classmethod
    def read(cls, loader: Callable[..., M], source: dict[str, Any], dtype: torch.dtype, device: torch.device) -> M:
        """As the file has it, mapped: the ranks of a machine share its pages, and each then takes its part."""
        stored = load_config(**{name: value for name, value in source.items() if name != "fresh_head"}).dtype
        return loader(**source, dtype=stored if isinstance(stored, torch.dtype) else dtype, device="cpu")

    def sequence_group(self, backbone: PreTrainedModel, settings: Settings) -> dist.ProcessGroup | None:
        ranks, key = self.shards.sequence, f"{self.shards.key}.ulysses_sequence_parallel_size"
        if ranks == 1:
            return None
        require_divisible_heads(backbone.config, ranks, key)
        if not settings.packed:
            raise UserError(
                "padded rows cannot be shared", key=key, value=ranks, fix="use_remove_padding=True, or leave it at 1"
            )
        return subgroups(ranks)

    def spread(self, model: nn.Module, settings: Settings, device: torch.device) -> None:
        """Layer by layer, so that at most one of them is whole at a time on the device."""
        shards, mesh = self.shards, self.mesh(device)
        offload = CPUOffloadPolicy() if shards.offload and device.type != "cpu" else OffloadPolicy()
        narrow = MixedPrecisionPolicy(
            param_dtype=settings.compute, reduce_dtype=shards.reduce, cast_forward_inputs=False
        )
        wide = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        layers = [module for module in model.modules() if type(module).__name__ in layer_classes(model)]
        for module in kept_wide(model):
            kept = torch.promote_types(settings.wide, torch.float32)
            widen(module, kept, kept)
            fully_shard(module, mesh=mesh, mp_policy=wide, offload_policy=offload)
        for module in layers:
            widen(module, settings.wide, settings.compute)
            fully_shard(module, mesh=mesh, mp_policy=narrow, offload_policy=offload,
                        reshard_after_forward=shards.reshard)  # fmt: skip
        widen(self.network, settings.wide, settings.compute)
        fully_shard(self.network, mesh=mesh, mp_policy=narrow, offload_policy=offload)
        for spread in self.sharded():
            spread.set_gradient_divide_factor(1.0)
            spread.set_force_sum_reduction_for_comms(True)
        if shards.prefetch:
            for before, after in pairwise(layers):
                assert isinstance(before, FSDPModule) and isinstance(after, FSDPModule)
                before.set_modules_to_forward_prefetch([after])

    def mesh(self, device: torch.device) -> DeviceMesh:
        """All ranks share one copy of the weights, or groups of `fsdp_size` each have one."""
        world, size = dist.get_world_size(), self.shards.size
        if size < 1 or size == world:
            return init_device_mesh(device.type, (world,))
        if world % size:
            divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise UserError(
                f"{world} ranks do not divide into groups of {size}",
                key=f"{self.shards.key}: fsdp_config.fsdp_size",
                value=size,
                fix=f"-1, or one of {divisors}",
            )
        return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))

    def sharded(self) -> Iterator[FSDPModule]:
        return (module for module in self.network.modules() if isinstance(module, FSDPModule))

    def reshard(self) -> None:
        """Frees what is gathered: copies must not outlive a change of their weights."""
        for module in self.sharded():
            module.reshard()

    def make_updater(self, optim: OptimConfig) -> Updater:
        return ShardedUpdater(self.model, optim, {}, self.settings.total_steps)

    def parts(self, batch: Batch, budget: Budget) -> list[Tensor]:
        """As many on every rank as the one that needs most of them. Where one has images, all run the tower."""
        self.sees = self.tower and bool(largest(len(images_of(batch)), self.device))
        budget = replace(budget, tokens=budget.tokens * self.shards.sequence)
        by_group = self.shares_prompts
        return budget.split_into(batch, largest(budget.needed(batch, by_group), self.device), by_group)

    def as_many_everywhere(self, parts: list[Tensor]) -> list[Tensor]:
        missing = largest(len(parts), self.device) - len(parts)
        return [*parts, *[torch.empty(0, dtype=torch.long)] * missing]

    def why_prompts_are_not_shared(self) -> str | None:
        return "ranks share each sequence" if self.sequence else super().why_prompts_are_not_shared()

    def forward(self, batch: Batch, want: Want) -> Outputs:
        found = super().forward(batch, want)
        self.reshard()
        return found

    def nothing(self, outputs: Outputs, want: Want) -> Tensor:
        """Returns 0 times the outputs: a rank in whose rows nothing counts runs backward with the others."""
        return torch.stack([getattr(outputs, name).sum() for name in sorted(want)]).sum() * 0.0

    def numbers(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Of all ranks; those that share sequences count once. The norm is everyone's already."""
        norm = sums.pop("grad_norm")
        total: dict[str, float] = {}
        for shares in self.everyones(super().numbers(sums)):
            for name, value in shares.items():
                total[name] = join_shares(name, total[name], value) if name in total else value
        return total | {"grad_norm": float(norm)}

    def inputs(self, batch: Batch) -> Inputs:
        inputs = super().inputs(batch) if len(batch) else None
        if inputs is None or inputs.tokens.numel() == 0:
            inputs = self.one_token((len(batch), batch.need("responses").shape[1]))
        if inputs.images is None and self.sees:
            inputs = replace(inputs, images=blank(self.backbone, self.device))
        return slice_of(inputs, self.sequence) if self.sequence else inputs

    def one_token(self, shape: tuple[int, int]) -> Inputs:
        """What goes through the model where nothing is asked of it."""
        zero, none = (torch.zeros(size, dtype=torch.long, device=self.device) for size in ((1, 1), (0,)))
        packed = Packed([1], self.device) if self.settings.packed else None
        mask = None if self.settings.packed else torch.ones_like(zero)
        return Inputs(zero, zero, packed, mask, states=none, targets=none, places=none, shape=shape,
                      cells=zero[0] - 1)  # fmt: skip

    def outputs(self, batch: Batch, want: Want) -> Outputs:
        inputs = self.routers.watch(self.inputs(batch), batch, want)
        said = want - EXPERT_COLUMNS
        found = self.network(inputs, said)
        columns = {name: inputs.per_token(found[name]) for name in sorted(said)}
        experts = self.routers.columns(inputs, batch, want)
        if self.sequence:
            columns = {name: SumOfSlices.apply(column, self.sequence) for name, column in columns.items()}
            experts = {name: joined_slices(column, self.sequence) for name, column in experts.items()}
        return Outputs(**columns, **experts, routing=inputs.routing)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one by one, in the type the model computes in; every rank must read to the end."""
        narrow = self.compute_dtypes()
        for name, param in self.model.named_parameters():
            yield name, self.whole(param.detach().to(self.device, narrow.get(name, param.dtype)))
        yield from self.stored_buffers().items()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def stored_buffers(self) -> dict[str, Tensor]:
        stored = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in stored}

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

    def everyones(self, thing: Any) -> list[Any]:
        return from_everyone(thing)[:: self.shards.sequence]

    def total(self, sums: Tensor) -> Tensor:
        """Ranks that share sequences have other tokens of them, so all count."""
        dist.all_reduce(sums)
        return sums

    @at_home
    def save(self, path: Path) -> None:
        """Each rank's part, for any number of ranks; and the model as `transformers` loads it, by rank 0."""
        writes = dist.get_rank() == 0
        if self.updater is not None:
            save_shards(path / SHARDS, self.own_tensors(), self.updater)
        if self.adapters:
            self.save_adapter(path, writes)
        if self.settings.saves_merged or not self.adapters:
            self.save_model(path / MERGED if self.adapters else path, writes)
        dist.barrier()

    @at_home
    def export(self, path: Path) -> None:
        save_streamed(path, self.twin.model, self.weights(), dist.get_rank() == 0)
        dist.barrier()

    def save_model(self, path: Path, writes: bool) -> None:
        path.mkdir(exist_ok=True)
        head: dict[str, Tensor] = {}
        save_streamed(path, self.twin.model, self.weights_but_head(head), writes)
        if writes and head:
            save_file(head, path / HEAD_FILE)

    def weights_but_head(self, head: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The backbone's under their own names; a value head is put aside."""
        critic = isinstance(self.model, ValueModel)
        for name, tensor in self.weights():
            if critic and name.startswith(HEAD):
                head[name.removeprefix(HEAD)] = tensor.cpu()
            else:
                yield name.removeprefix(BACKBONE) if critic else name, tensor

    @at_home
    def load(self, path: Path) -> None:
        """What `save` wrote, here or on any other number of ranks, or in one process."""
        self.all_changes()
        if (path / SHARDS).is_dir():
            load_shards(path / SHARDS, self.own_tensors(), self.updater)
        else:
            self.load_whole(path, self.own_tensors())
        self.reshard()

    def own_tensors(self) -> dict[str, Tensor]:
        """Of adapters, what is trained."""
        params = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad or not self.adapters}
        return params if self.adapters else params | self.stored_buffers()

    def load_whole(self, path: Path, own: dict[str, Tensor]) -> None:
        """What one process wrote: each rank takes its part of it."""
        stored = self.stored_weights(path)
        for name, tensor in own.items():
            copy_into(tensor, stored[name])
        if self.updater is None:
            return
        state = torch.load(path / OPTIMIZER_FILE, map_location="cpu", weights_only=True, mmap=True)
        self.updater.step_no = state["step"]
        for number, master in enumerate(self.updater.masters):
            fields: dict[str, Tensor] = {}
            for field, value in state["optimizer"]["state"].get(number, {}).items():
                fields[field] = (
                    torch.zeros_like(master, dtype=value.dtype) if value.shape == master.shape else value.clone()
                )
                copy_into(fields[field], value)
            self.updater.optimizer.state[master] = fields


def layer_classes(model: nn.Module) -> frozenset[str]:
    backbone = model.backbone if isinstance(model, ValueModel) else model
    return frozenset(getattr(backbone, "_no_split_modules", None) or ())


def kept_wide(model: nn.Module) -> list[nn.Module]:
    """Modules that compute in float32 whatever the rest does: the value head, and what transformers keeps so."""
    backbone = model.backbone if isinstance(model, ValueModel) else model
    names = {"value_head"}
    for listed in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names |= set(getattr(backbone, listed, None) or ())
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    return [module for module in found if any(True for _ in module.parameters())]


def widen(module: nn.Module, wide: torch.dtype, compute: torch.dtype) -> None:
    """Parameters that are not spread yet take the type of the masters; frozen ones have no master."""
    for param in module.parameters():
        if not isinstance(param, DTensor) and param.is_floating_point():
            param.data = param.data.to(wide if param.requires_grad else compute)
