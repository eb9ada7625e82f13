"""The numbers that memory and advice ask for, read off a config."""

from __future__ import annotations

from paddock.config.engine import FSDPConfig, MegatronConfig
from paddock.config.recipes import recipe_of
from paddock.config.resolve import MICRO_BATCHES
from paddock.config.roles import ActorConfig, CriticConfig, RefConfig
from paddock.config.schema import Config
from paddock.config.topology import data_parallel_size, engine_size, needs_reference, world_size
from paddock.config.tree import get
from paddock.facts.machine import GIB, GPU_MEMORY_GIB, Machine, this_machine
from paddock.facts.models import ModelShape, shape_of
from paddock.plan.advice import Facts
from paddock.plan.arithmetic import BatchPlan
from paddock.plan.memory import Fsdp, Hardware, Job, Megatron, Role, Rollout

GUIDE_GPU = "h100"  # planned for where no GPU is here and none is named


def job(config: Config, gpu: str | None = None, machine: Machine | None = None) -> Job | None:
    """None where the actor's shape is not known."""
    group = config.actor_rollout_ref
    shape = shape_of(group.model.path or "")
    if shape is None:
        return None
    critic_shape = shape_of(config.critic.model.path or "") or shape
    reward_shape = shape_of(config.reward_model.model.path or "") if config.reward_model.enable else None
    return Job(
        hardware=hardware(config, gpu, machine or this_machine()),
        actor=_trained(config, "actor_rollout_ref.actor", group.actor, shape),
        rollout=_rollout(config),
        reference=_reference(config, shape) if needs_reference(config) else None,
        critic=_trained(config, "critic", config.critic, critic_shape) if config.critic.enable else None,
        reward_model=_reward_model(config, reward_shape) if reward_shape else None,
        compute_bytes=_bytes(group.actor.fsdp_config.dtype),
    )


def hardware(config: Config, gpu: str | None, machine: Machine) -> Hardware:
    trainer = config.trainer
    if trainer.device == "cpu":
        return Hardware(gpus=0, gpus_per_node=0, memory_bytes=machine.memory)
    known = GPU_MEMORY_GIB[(gpu or GUIDE_GPU).lower()] * GIB
    memory = machine.device_memory if gpu is None and machine.device_memory else known
    return Hardware(gpus=world_size(config), gpus_per_node=trainer.n_gpus_per_node or 1, memory_bytes=memory)


def micro_tokens(config: Config, section: str) -> int:
    """Tokens of one micro-batch at most: the budget, or full rows."""
    rows, switch = next((rows, switch) for name, rows, switch in MICRO_BATCHES if name == section)
    if get(config, f"{section}.{switch}"):
        budget = {
            "actor_rollout_ref.actor": "ppo_max_token_len_per_gpu",
            "actor_rollout_ref.ref": "log_prob_max_token_len_per_gpu",
            "actor_rollout_ref.rollout": "log_prob_max_token_len_per_gpu",
            "critic": "ppo_max_token_len_per_gpu",
            "reward_model": "forward_max_token_len_per_gpu",
        }[section]
        return int(get(config, f"{section}.{budget}"))
    return int(get(config, f"{section}.{rows}")) * _row_tokens(config)


def _row_tokens(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _trained(config: Config, section: str, role: ActorConfig | CriticConfig, shape: ModelShape) -> Role:
    model = config.actor_rollout_ref.model if isinstance(role, ActorConfig) else role.model
    fsdp = role.fsdp_config if isinstance(role, ActorConfig) else role.model.fsdp_config
    forward = "actor_rollout_ref.rollout" if isinstance(role, ActorConfig) else section
    offload: FSDPConfig | MegatronConfig = role.megatron if role.strategy == "megatron" else fsdp
    most = _rows_of_a_step(config, role) * _row_tokens(config)
    return Role(
        shape=shape,
        split=_split(config, role, fsdp),
        update_tokens=min(micro_tokens(config, section), most),
        forward_tokens=min(micro_tokens(config, forward), most),
        dtype_bytes=_bytes(fsdp.model_dtype),
        lora_rank=model.lora.rank if role.strategy == "megatron" else model.lora_rank,
        checkpointing=model.enable_gradient_checkpointing,
        param_offload=offload.param_offload,
        optimizer_offload=offload.optimizer_offload,
    )


def _reference(config: Config, shape: ModelShape) -> Role:
    ref = config.actor_rollout_ref.ref
    offload: FSDPConfig | MegatronConfig = ref.megatron if ref.strategy == "megatron" else ref.fsdp_config
    most = _rows_of_a_step(config, ref) * _row_tokens(config)
    return Role(
        shape=shape,
        split=_split(config, ref, ref.fsdp_config),
        forward_tokens=min(micro_tokens(config, "actor_rollout_ref.ref"), most),
        dtype_bytes=_bytes(ref.fsdp_config.dtype),
        param_offload=offload.param_offload,
    )


def _reward_model(config: Config, shape: ModelShape) -> Role:
    reward = config.reward_model
    return Role(
        shape=shape,
        split=Fsdp(degree=world_size(config)),
        forward_tokens=micro_tokens(config, "reward_model"),
        dtype_bytes=2,
        param_offload=reward.model.fsdp_config.param_offload,
    )


def _rows_of_a_step(config: Config, role: ActorConfig | RefConfig | CriticConfig) -> int:
    """Of one device: a micro-batch is never larger than that."""
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return -(-rows // data_parallel_size(config, role))


def _split(config: Config, role: ActorConfig | RefConfig | CriticConfig, fsdp: FSDPConfig) -> Fsdp | Megatron:
    world = world_size(config)
    if role.strategy == "megatron":
        m = role.megatron
        return Megatron(
            world=world,
            tensor=m.tensor_model_parallel_size,
            pipeline=m.pipeline_model_parallel_size,
            context=m.context_parallel_size,
            expert=m.expert_model_parallel_size,
            expert_tensor=m.expert_tensor_parallel_size,
            distributed_optimizer=m.use_distributed_optimizer,
        )
    degree = world if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, world)
    return Fsdp(degree=degree, sequence=role.ulysses_sequence_parallel_size)


def _rollout(config: Config) -> Rollout:
    rollout, size = config.actor_rollout_ref.rollout, engine_size(config)
    return Rollout(
        engine=rollout.name or "embedded",  # type: ignore[arg-type]
        rows=-(-config.data.train_batch_size * rollout.n * size // world_size(config)),
        row_tokens=_row_tokens(config),
        max_sequences=rollout.max_num_seqs or 1,
        tensor=size,
        memory_fraction=rollout.gpu_memory_utilization,
        sleeps=rollout.free_cache_engine,
    )


def _bytes(dtype: str) -> int:
    return 4 if dtype in ("float32", "fp32") else 2


def advice_facts(config: Config, batch: BatchPlan, work: Job | None) -> Facts:
    group, algorithm, trainer = config.actor_rollout_ref, config.algorithm, config.trainer
    actor, optim = group.actor, group.actor.optim
    recipe = recipe_of(algorithm.adv_estimator)
    shape = shape_of(group.model.path or "")
    return Facts(
        estimator=algorithm.adv_estimator,
        grouped=recipe is not None and "groups" in recipe.needs,
        critic=bool(config.critic.enable),
        n=group.rollout.n,
        model_name=group.model.path or "",
        model_billions=shape.billions if shape else None,
        lr=optim.lr,
        lora=group.model.lora_rank > 0 or group.model.lora.rank > 0,
        warmup_steps=optim.lr_warmup_steps,
        warmup_ratio=optim.lr_warmup_steps_ratio,
        use_kl_in_reward=algorithm.use_kl_in_reward,
        kl_coef=algorithm.kl_ctrl.kl_coef,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        test_freq=trainer.test_freq,
        total_epochs=trainer.total_epochs,
        steps_per_epoch=batch.steps_per_epoch,
        total_steps=batch.total_steps,
        train_batch_size=config.data.train_batch_size,
        cut_by_rows=not actor.use_dynamic_bsz,
        job=work,
    )
