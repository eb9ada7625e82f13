"""The job that the memory model estimates, read off a config: roles, splits, micro-batches, the rollout, hardware."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paddock.config.conversations import has_agent_loops
from paddock.config.distillation import teachers_of
from paddock.config.engine import FrozenConfig, FrozenMegatronConfig, FSDPConfig, MegatronConfig, ShardedConfig
from paddock.config.phases import CUTS
from paddock.config.roles import ActorConfig, CriticConfig, CriticModelConfig, ModelConfig, RefConfig
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config, row_tokens
from paddock.config.topology import (
    computes_merged,
    copies_rollout_log_probs,
    data_parallel_size,
    engine_size,
    merges_adapters,
    pool_size,
    roles_of,
    rollout_pool,
    rolls_out_apart,
    rolls_out_beside,
    splits_models,
    trains_adapters,
    world_size,
)
from paddock.errors import UserError
from paddock.estimate.memory import Hardware, RoleLoad, RolloutLoad, StepLoad, scalar
from paddock.estimate.splits import Fsdp, Megatron
from paddock.facts.machine import GIB, GPU_MEMORY_GIB, Machine, this_machine
from paddock.facts.models import ModelShape, shape_of

GUIDE_GPU = {"cuda": "h100", "npu": "910b"}  # planned for where no such device is here and none is named


def job(config: Config, gpu: str | None = None, machine: Machine | None = None) -> StepLoad | None:
    """Returns the job; None if the actor's shape is not known."""
    shape = shape_of(config.actor_rollout_ref.model.path or "")
    if shape is None:
        return None
    return StepLoad(
        hardware=hardware(config, gpu, machine or this_machine()),
        rollout=_rollout(config),
        roles={
            role.name: load
            for role in roles_of(config)
            if role.name in LOADS and (load := LOADS[role.name](config, shape)) is not None
        },
        compute_bytes=_bytes(config.actor_rollout_ref.actor.fsdp_config.dtype),
        own_log_probs=not copies_rollout_log_probs(config),
    )


def hardware(config: Config, gpu: str | None, machine: Machine) -> Hardware:
    trainer = config.trainer
    if trainer.device == "cpu":
        return Hardware(gpus=0, gpus_per_node=0, memory_bytes=machine.memory)
    name = planned_device(config, gpu, machine)
    memory = GPU_MEMORY_GIB[name] * GIB if name else machine.device_memory
    share = (memory or 0) // trainer.ranks_per_device
    return Hardware(gpus=world_size(config), gpus_per_node=trainer.n_gpus_per_node or 1, memory_bytes=share)


def planned_device(config: Config, gpu: str | None, machine: Machine) -> str | None:
    """Returns the named device, else the guide's; None: the one that is here, of which only the memory is known."""
    if gpu is not None:
        return gpu
    here = machine.device == config.trainer.device and machine.device_memory
    return None if here else GUIDE_GPU[config.trainer.device or "cuda"]


def _trained(config: Config, role: ActorConfig | CriticConfig, shape: ModelShape) -> RoleLoad:
    update, forward = ("update_actor", "old_log_prob") if isinstance(role, ActorConfig) else ("update_critic", "values")
    model = config.actor_rollout_ref.model if isinstance(role, ActorConfig) else role.model
    fsdp = role.fsdp_config if isinstance(role, ActorConfig) else role.model.fsdp_config
    offload: FSDPConfig | MegatronConfig = role.megatron if splits_models(role) else fsdp
    most = _rows_of_a_step(config, role) * row_tokens(config.data)
    rank = model.lora.rank if splits_models(role) else lora_rank(model)
    return RoleLoad(
        shape=shape,
        split=_split(config, role, fsdp),
        update_tokens=min(CUTS[update].most_tokens(config), most),
        forward_tokens=min(CUTS[forward].most_tokens(config), most),
        dtype_bytes=4 if rank else _bytes(fsdp.model_dtype),  # adapters have float32 masters
        lora_rank=rank,
        merges=isinstance(role, ActorConfig) and computes_merged(config),
        checkpointing=model.enable_gradient_checkpointing,
        activation_offload=model.enable_activation_offload,
        param_offload=offload.param_offload,
        optimizer_offload=offload.optimizer_offload,
        frozen_vision=config.actor_rollout_ref.actor.freeze_vision_tower,
        image_share=config.data.max_prompt_length / row_tokens(config.data),
    )


def lora_rank(model: ModelConfig | CriticModelConfig) -> int:
    """The config's, or that of the adapter to start from, where it can be read."""
    start = getattr(model, "lora_adapter_path", None)
    if model.lora_rank or not start:
        return model.lora_rank
    try:
        return int(json.loads((Path(start).expanduser() / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError):
        return 0


def _critic(config: Config, shape: ModelShape) -> RoleLoad:
    return scalar(_trained(config, config.critic, shape_of(config.critic.model.path or "") or shape))


def _teachers(config: Config, student: ModelShape) -> RoleLoad | None:
    """Returns the teachers as one role, by the keys of the reference: the largest works, and all rest on the device."""
    shapes = [shape for one in teachers_of(config.distillation) if (shape := shape_of(one.path)) is not None]
    if not shapes:
        return None
    largest, *others = sorted(shapes, key=lambda shape: -shape.parameters)
    return replace(_reference(config, largest), borrowed=False, others=tuple(others))


def _reference(config: Config, shape: ModelShape) -> RoleLoad:
    ref = config.actor_rollout_ref.ref
    offload: FrozenConfig | FrozenMegatronConfig = ref.megatron if splits_models(ref) else ref.fsdp_config
    most = _rows_of_a_step(config, ref) * row_tokens(config.data)
    return RoleLoad(
        borrowed=trains_adapters(config.actor_rollout_ref),
        shape=shape,
        split=_split(config, ref, ref.fsdp_config),
        forward_tokens=min(CUTS["ref"].most_tokens(config), most),
        dtype_bytes=_bytes(ref.fsdp_config.dtype),
        param_offload=offload.param_offload,
    )


def _reward_model(config: Config, policy: ModelShape) -> RoleLoad | None:
    reward = config.reward_model
    shape = shape_of(reward.model.path or "")
    if shape is None:
        return None
    return scalar(
        RoleLoad(
            shape=shape,
            split=Fsdp(degree=world_size(config)),
            forward_tokens=CUTS["reward"].most_tokens(config),
            dtype_bytes=2,
            param_offload=reward.model.fsdp_config.param_offload,
        )
    )


LOADS: dict[str, Callable[[Config, ModelShape], RoleLoad | None]] = {
    "actor": lambda config, shape: _trained(config, config.actor_rollout_ref.actor, shape),
    "reference": _reference,
    "teachers": _teachers,
    "critic": _critic,
    "reward_model": _reward_model,
}
"""What makes of each role of topology.ROLES its part of the memory model; None: the shape of its model is not known."""


def _rows_of_a_step(config: Config, role: ActorConfig | RefConfig | CriticConfig) -> int:
    """Returns the rows of one device in a step: a micro-batch is never larger."""
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return -(-rows // data_parallel_size(config, role))


def _split(config: Config, role: ActorConfig | RefConfig | CriticConfig, fsdp: ShardedConfig) -> Fsdp | Megatron:
    world = pool_size(config, role)
    if splits_models(role):
        m = role.megatron
        return Megatron(
            world=world,
            tensor=m.tensor_model_parallel_size,
            pipeline=m.pipeline_model_parallel_size,
            context=m.context_parallel_size,
            expert=m.expert_model_parallel_size,
            expert_tensor=m.expert_tensor_parallel_size,
            distributed_optimizer=not isinstance(m, MegatronConfig) or m.use_distributed_optimizer,
            host_optimizer=_host_optimizer(role),
        )
    degree = world if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, world)
    return Fsdp(
        degree=degree,
        sequence=role.ulysses_sequence_parallel_size,
        on_host=fsdp.offload_policy,
        frozen_bytes=_bytes(fsdp.dtype),
        alone=world == 1 and config.trainer.device != "cpu",
    )


def _host_optimizer(role: ActorConfig | RefConfig | CriticConfig) -> float:
    """Megatron's own names: optimizer_cpu_offload, and the fraction of it that goes."""
    if isinstance(role, RefConfig):
        return 0.0
    options = role.optim.override_optimizer_config
    fraction = options.get("optimizer_offload_fraction", 1.0)
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        key = "optim.override_optimizer_config.optimizer_offload_fraction"
        raise UserError("is a share from 0 to 1", key=key, value=fraction, fix=f"{key}=1.0")
    return float(fraction) if options.get("optimizer_cpu_offload") else 0.0


def _rollout(config: Config) -> RolloutLoad:
    rollout, size, data = config.actor_rollout_ref.rollout, engine_size(config), config.data
    shares_prompts = engine_kind(rollout.name).trainer_log_probs and config.trainer.device != "cpu"
    # a later turn of an agent loop may have another prompt, which is cached behind the first
    later_prompt = data.max_prompt_length if shares_prompts and has_agent_loops(rollout.agent) else 0
    return RolloutLoad(
        engine=rollout.name or "embedded",
        rows=-(-config.data.train_batch_size * rollout.n * size // rollout_pool(config).size),
        row_tokens=row_tokens(data) + later_prompt,
        max_sequences=rollout.max_num_seqs or 1,
        tensor=size,
        memory_fraction=rollout.gpu_memory_utilization,
        ahead=config.algorithm.staleness,
        sleeps=rollout.free_cache_engine and not rolls_out_apart(config),
        apart=rolls_out_apart(config) and not rolls_out_beside(config),
        copy=rolls_out_apart(config),
        shared_tokens=data.max_prompt_length if shares_prompts else 0,
        sharing=rollout.n,
        validation_rows=_validated(config),
        validation_sharing=rollout.val_kwargs.n,
        merges=merges_adapters(config.actor_rollout_ref) and not computes_merged(config),
        prefill_tokens=min(rollout.max_num_batched_tokens, data.train_batch_size * data.max_prompt_length),
    )


def _validated(config: Config) -> int:
    """Returns the most responses that a validation asks an engine for at a time: without data.val_batch_size, as many
    as it takes."""
    trainer, data, rollout = config.trainer, config.data, config.actor_rollout_ref.rollout
    if not data.val_files or not (trainer.test_freq > 0 or trainer.val_before_train or trainer.val_only):
        return 0
    most = rollout.max_num_seqs or 1
    if data.val_batch_size is None:
        return most
    return min(most, -(-data.val_batch_size * rollout.val_kwargs.n * engine_size(config) // rollout_pool(config).size))


def _bytes(dtype: str) -> int:
    return 4 if dtype in ("float32", "fp32") else 2
