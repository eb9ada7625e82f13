"""The backend for many devices, FSDP2: a rank keeps a shard of every weight and gathers what it computes with.

Ranks work on different rows or, with Ulysses, on slices of the same ones. Losses have the denominators of the whole
mini-batch, so gradients are summed over ranks, not averaged; and all ranks run the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from paddock.config.engine import FSDPConfig
from paddock.core.batch import Batch
from paddock.core.device import DTYPES, make_deterministic
from paddock.core.processes import from_everyone, largest, subgroups
from paddock.engines.train import forwards
from paddock.engines.train.activations import activation_offload
from paddock.engines.train.base import EXPERT_COLUMNS, SHARDS, Outputs, Placement, Want
from paddock.engines.train.checkpoints import OPTIMIZER_FILE, own_tensors, stored_weights
from paddock.engines.train.optim import updater_of, whole
from paddock.engines.train.routers import Routers
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.shards import copy_into, load_shards, save_gathered, save_shards
from paddock.errors import UserError
from paddock.models.adapters import adapters_of
from paddock.models.gathered import GatheredModel
from paddock.models.packing import Inputs, images_of
from paddock.models.ulysses import require_divisible_heads, slice_of
from paddock.models.value_head import ValueModel
from paddock.models.vision import blank, tower_of


class Network(nn.Module):
    """Runs all that reads parameters in one forward, around which FSDP gathers the parameters outside of layers."""

    def __init__(self, model: PreTrainedModel | ValueModel, settings: Settings):
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, inputs: Inputs, want: Want, choices: Tensor | None) -> dict[str, Tensor]:
        found = forwards.per_state(self.model, inputs, want, self.settings, choices)
        return {name: value.clone() if value._is_view() else value for name, value in found.items()}  # FSDP hooks them


class FSDPBackend:
    """See `Backend`. Masters are shards of the weights; the copies that the model computes with are FSDP's business."""

    name: ClassVar = "fsdp"
    spans_ranks: ClassVar = True

    def __init__(self, model: PreTrainedModel | ValueModel, settings: Settings, placement: Placement):
        self.model, self.settings, self.backbone = model, settings, forwards.backbone_of(model)
        self.placement, self.device = placement, placement.device
        self.sequence = self.sequence_group()
        self.adapters, self.gathered_model = adapters_of(self.backbone), GatheredModel.of(self.backbone, self.device)
        self.network = Network(model, settings)
        self.spread()
        self.routers = Routers(self.backbone, settings.routers, over_ranks=True)
        self.activations = activation_offload(model, settings, self.device)
        if settings.deterministic:
            make_deterministic(self.device)
        self.updater = updater_of(model, settings, {})
        forwards.tell_unfused(self.backbone, settings, "its weights are sharded")
        self.tower, self.sees = tower_of(self.backbone) is not None, False
        if self.tower and not settings.packed:
            raise UserError(
                "beside images, ranks share packed rows only",
                key=f"{self.placement.section}: model.use_remove_padding",
                value=False,
                fix="leave it at True",
            )

    @classmethod
    def place(cls, model: Any, settings: Settings, placement: Placement) -> Self:
        return cls(model, settings, placement)

    def sequence_group(self) -> dist.ProcessGroup | None:
        """Returns the ranks that share each sequence with this one."""
        ranks, key = self.placement.sequence, f"{self.placement.section}.ulysses_sequence_parallel_size"
        if ranks == 1:
            return None
        require_divisible_heads(self.backbone.config, ranks, key)
        if not self.settings.packed:
            raise UserError(
                "padded rows cannot be shared", key=key, value=ranks, fix="use_remove_padding=True, or leave it at 1"
            )
        return subgroups(ranks)

    def spread(self) -> None:
        """Shards the weights layer by layer, so that at most one layer is whole at a time on the device."""
        model, settings, keys, mesh = self.model, self.settings, self.placement.fsdp, self.mesh()
        offload = CPUOffloadPolicy() if keys.offload_policy and self.device.type != "cpu" else OffloadPolicy()
        reduce = DTYPES[keys.mixed_precision.reduce_dtype] if isinstance(keys, FSDPConfig) else torch.float32
        narrow = MixedPrecisionPolicy(param_dtype=settings.compute, reduce_dtype=reduce, cast_forward_inputs=False)
        wide = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        classes = frozenset(getattr(self.backbone, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in classes]
        for module in wide_modules(model):
            kept = torch.promote_types(settings.wide, torch.float32)
            widen(module, kept, kept)
            fully_shard(module, mesh=mesh, mp_policy=wide, offload_policy=offload)
        for module in layers:
            widen(module, settings.wide, settings.compute)
            fully_shard(module, mesh=mesh, mp_policy=narrow, offload_policy=offload,
                        reshard_after_forward=keys.reshard_after_forward)  # fmt: skip
        widen(self.network, settings.wide, settings.compute)
        fully_shard(self.network, mesh=mesh, mp_policy=narrow, offload_policy=offload)
        for spread in self.sharded():
            spread.set_gradient_divide_factor(1.0)
            spread.set_force_sum_reduction_for_comms(True)
        if keys.forward_prefetch:
            for before, after in pairwise(layers):
                assert isinstance(before, FSDPModule) and isinstance(after, FSDPModule)
                before.set_modules_to_forward_prefetch([after])

    def mesh(self) -> DeviceMesh:
        """Lets all ranks share one copy of the weights, or gives each group of `fsdp_size` ranks one."""
        world, size = dist.get_world_size(), self.placement.fsdp.fsdp_size
        if size < 1 or size == world:
            return init_device_mesh(self.device.type, (world,))
        if world % size:
            divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise UserError(
                f"{world} ranks do not divide into groups of {size}",
                key=f"{self.placement.section}: fsdp_config.fsdp_size",
                value=size,
                fix=f"-1, or one of {divisors}",
            )
        return init_device_mesh(self.device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))

    def sharded(self) -> Iterator[FSDPModule]:
        return (module for module in self.network.modules() if isinstance(module, FSDPModule))

    def reshard(self) -> None:
        """Frees gathered weights: these copies must not outlive a change of the shards."""
        for module in self.sharded():
            module.reshard()

    @property
    def shares_prompts(self) -> bool:
        why_not = "ranks share each sequence" if self.sequence else None
        return forwards.shares_prompts(self.settings, self.routers, why_not)

    def parts(self, batch: Batch, budget: Budget) -> list[Tensor]:
        """See `Backend.parts`. If one rank has images, all run the tower."""
        self.sees = self.tower and bool(largest(len(images_of(batch)), self.device))
        budget = replace(budget, tokens=budget.tokens * self.placement.sequence)
        by_group = self.shares_prompts
        return budget.split_into(batch, largest(budget.needed(batch, by_group), self.device), by_group)

    def inputs(self, batch: Batch) -> Inputs:
        inputs = forwards.never_empty(batch, self.device, self.settings.packed, self.shares_prompts)
        if inputs.images is None and self.sees:
            inputs = replace(inputs, images=blank(self.backbone, self.device))
        return slice_of(inputs, self.sequence) if self.sequence else inputs

    def forward(self, micro_batches: list[Batch], want: Want) -> Iterator[tuple[Batch, Outputs]]:
        for micro in micro_batches:
            with self.activations.offloaded() if self.activations else nullcontext():
                inputs = self.routers.watch(self.inputs(micro), micro, want)
                choices = forwards.choices_of(micro, inputs, want)
                found = self.network(inputs, want - EXPERT_COLUMNS, choices)
                outputs = forwards.outputs_of(found, inputs, micro, want, self.routers, self.sequence)
            yield micro, outputs
        if not torch.is_grad_enabled():
            self.reshard()

    def backward(self, share: Tensor) -> None:
        share.backward()

    def without_adapters(self) -> AbstractContextManager[None]:
        assert self.adapters is not None
        return self.adapters.off()

    def everyones(self, thing: Any) -> list[Any]:
        return from_everyone(thing)[:: self.placement.sequence]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.tensors`. Gathers one by one."""
        narrow = forwards.compute_dtypes(self.model, self.settings.compute)
        for name, param in self.model.named_parameters():
            yield name, whole(param.detach().to(self.device, narrow.get(name, param.dtype)))
        yield from forwards.stored_buffers(self.model).items()

    def save_state(self, path: Path) -> None:
        """Writes each rank's shards of weights and optimizer, for any number of ranks."""
        assert self.updater is not None
        save_shards(path / SHARDS, own_tensors(self.model, self.updater, self.adapters), self.updater)

    def save_model(self, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        save_gathered(path, self.gathered_model.model, weights, critic=isinstance(self.model, ValueModel))

    def load(self, path: Path) -> None:
        """Reads what any number of ranks wrote, or one process."""
        own = own_tensors(self.model, self.updater, self.adapters)
        if (path / SHARDS).is_dir():
            load_shards(path / SHARDS, own, self.updater)
        else:
            self.load_whole(path, own)
        self.reshard()

    def load_whole(self, path: Path, own: dict[str, Tensor]) -> None:
        """Reads this rank's shards of what one process wrote."""
        stored = stored_weights(self.model, path, self.adapters)
        for name, tensor in own.items():
            copy_into(tensor, stored[name])
        if self.updater is None:
            return
        state = torch.load(path / OPTIMIZER_FILE, map_location="cpu", weights_only=True, mmap=True)
        self.updater.step_no = state["step"]
        for number, master in enumerate(self.updater.masters):
            fields: dict[str, Tensor] = {}
            for field, value in state["optimizer"]["state"].get(number, {}).items():
                if value.shape == master.shape:
                    room = torch.zeros_like(master, dtype=value.dtype)
                    copy_into(room, value)
                else:
                    room = value.to(self.updater.number_device(master), copy=True)
                fields[field] = room
            self.updater.optimizer.state[master] = fields


def wide_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules with parameters that compute in float32 whatever the rest does."""
    names = forwards.kept_wide(model)
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    return [module for module in found if any(True for _ in module.parameters())]


def widen(module: nn.Module, wide: torch.dtype, compute: torch.dtype) -> None:
    """Gives parameters that are not sharded yet the type of the masters; frozen ones have no master."""
    for param in module.parameters():
        if not isinstance(param, DTensor) and param.is_floating_point():
            param.data = param.data.to(wide if param.requires_grad else compute)
