"""Layouts of a model and its rows over ranks, by Megatron's names, and their process groups."""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from paddock.config.engine import FrozenMegatronConfig, MegatronConfig
from paddock.core.processes import Rendezvous, join
from paddock.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Says how many ranks share what. Rank numbers go by tensor, context, data, pipeline; the first varies fastest."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False
    """Between matrices, the ranks that share them share the tokens."""
    spread_optimizer: bool = True
    """Data-parallel ranks share the optimizer's state."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig."""
    seed: int = 42
    key: str = "actor_rollout_ref.actor.megatron"
    """Section of the role, for errors."""

    @classmethod
    def of(cls, config: FrozenMegatronConfig, key: str) -> Layout:
        tensor = config.tensor_model_parallel_size
        return cls(
            tensor=tensor,
            pipeline=config.pipeline_model_parallel_size,
            context=config.context_parallel_size,
            expert=config.expert_model_parallel_size,
            expert_tensor=config.expert_tensor_parallel_size,
            sequence=config.sequence_parallel and tensor > 1,
            spread_optimizer=not isinstance(config, MegatronConfig) or config.use_distributed_optimizer,
            overrides=dict(config.override_transformer_config),
            seed=config.seed,
            key=key,
        )

    @property
    def ranks(self) -> tuple[int, int, int, int, int | None]:
        return self.tensor, self.pipeline, self.context, self.expert, self.expert_tensor

    @property
    def slices(self) -> int:
        """Returns the number of parts of equal length that packed tokens must divide into."""
        return self.context * (self.tensor if self.sequence else 1)

    def start(self, device: torch.device) -> None:
        """Makes the process groups of all ranks; roles of one process share them."""
        if not dist.is_initialized():
            join_alone(device)
        if mpu.model_parallel_is_initialized() and of_these_ranks():
            self.require_same()
            return
        mpu.destroy_model_parallel()
        self.require_room()
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.pipeline,
            context_parallel_size=self.context,
            expert_model_parallel_size=self.expert,
            expert_tensor_parallel_size=self.expert_tensor,
            create_gloo_process_groups=False,
        )
        if device.type != "cpu":
            model_parallel_cuda_manual_seed(self.seed)

    def require_same(self) -> None:
        there = (
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_pipeline_model_parallel_world_size(),
            mpu.get_context_parallel_world_size(),
            mpu.get_expert_model_parallel_world_size(),
            mpu.get_expert_tensor_parallel_world_size(),
        )
        asked = (*self.ranks[:4], self.expert_tensor or self.tensor)
        if asked != there:
            raise UserError(
                "Megatron has one layout a process: another role here has "
                f"tensor x pipeline x context x expert x expert_tensor = {' x '.join(map(str, there))}",
                key=self.key,
                value=" x ".join(map(str, asked)),
                fix="give actor, reference and critic the same sizes, or the critic a pool of its own",
            )

    def require_room(self) -> None:
        world, model = dist.get_world_size(), self.tensor * self.pipeline * self.context
        experts = self.expert * (self.expert_tensor or self.tensor) * self.pipeline
        for ranks, what in ((model, "tensor x pipeline x context"), (experts, "expert x expert_tensor x pipeline")):
            if world % ranks:
                raise UserError(
                    f"{world} ranks do not divide into groups of {what} = {ranks}",
                    key=f"{self.key}.{what.split()[0]}_model_parallel_size",
                    value=self.expert if ranks == experts else self.tensor,
                    fix="sizes whose product divides the number of devices",
                )


@dataclass(frozen=True)
class ParallelRanks:
    """Holds the process groups of this rank; read once `Layout.start` has made them."""

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup
    replicas: dist.ProcessGroup
    """Ranks with the same part of the model: their gradients are summed."""
    expert: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    expert_replicas: dist.ProcessGroup
    embedding: dist.ProcessGroup | None
    """First and last stage, which both have a tied embedding."""

    @classmethod
    def here(cls) -> ParallelRanks:
        ends = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
        return cls(
            tensor=mpu.get_tensor_model_parallel_group(),
            pipeline=mpu.get_pipeline_model_parallel_group(),
            context=mpu.get_context_parallel_group(),
            replicas=mpu.get_data_parallel_group(with_context_parallel=True),
            expert=mpu.get_expert_model_parallel_group(),
            expert_tensor=mpu.get_expert_tensor_parallel_group(),
            expert_replicas=mpu.get_expert_data_parallel_group(),
            embedding=mpu.get_embedding_group() if ends else None,
        )

    @property
    def stage(self) -> int:
        return self.pipeline.rank()

    @property
    def stages(self) -> int:
        return self.pipeline.size()

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def speakers(self) -> list[int]:
        """Returns one rank of each replica: on the last stage, which knows the loss of the replica's rows."""
        alike = self.tensor.size() * self.context.size()
        world = dist.get_world_size()
        return list(range(world - world // self.stages, world, alike))


def of_these_ranks() -> bool:
    """Tells whether Megatron's groups are of the ranks that are joined now: a process may have been in other groups."""
    try:
        return dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group()) != []
    except (ValueError, KeyError):
        return False


def join_alone(device: torch.device) -> None:
    """Makes a process group of one process, because Megatron asks for groups."""
    join(Rendezvous(), device)
    atexit.register(leave)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
