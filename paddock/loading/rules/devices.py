"""Rules on batches, devices, engines and what they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paddock.config import tree
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config, row_tokens
from paddock.config.topology import (
    computes_merged,
    data_parallel_size,
    engine_roles,
    engine_size,
    merges_adapters,
    model_parallel_size,
    needs_reference,
    pool_size,
    rollout_pool,
    rolls_out_apart,
    runs_frozen_policies,
    trains_adapters,
)
from paddock.errors import UserError
from paddock.loading.rules.form import Scope, rule

_A = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_M = "actor_rollout_ref.model"
_RO = "actor_rollout_ref.rollout"


@rule
def devices_divide_into_groups(config: Config) -> None:
    for kind in engine_roles(config):
        role = kind.keys(config)
        size, devices = model_parallel_size(role), pool_size(config, role)
        if devices % size:
            key = "megatron.tensor x pipeline x context" if role.strategy == "megatron" else "ulysses_sequence"
            raise UserError(
                f"{devices} devices do not divide into groups of {size}",
                key=f"{kind.section}.{key}_parallel_size",
                value=size,
                fix=f"a divisor of n_gpus_per_node x nnodes = {devices}",
            )
    size, pool = engine_size(config), rollout_pool(config)
    if pool.size % size:
        raise UserError(
            f"{pool.size} devices do not divide into engines of {size}",
            key=f"{_RO}.tensor_model_parallel_size",
            value=config.actor_rollout_ref.rollout.tensor_model_parallel_size,
            fix=f"a divisor of {pool.key}.n_gpus_per_node x {pool.key}.nnodes = {pool.size}",
        )


@rule(Scope.UPDATES)
def mini_batches_divide_the_batch(config: Config) -> None:
    batch = config.data.train_batch_size
    roles: list[tuple[str, int]] = [(_A, config.actor_rollout_ref.actor.ppo_mini_batch_size)]
    if config.critic.enable:
        roles.append(("critic", config.critic.ppo_mini_batch_size))
    for section, mini in roles:
        if mini > batch:
            raise UserError(
                f"a step has only data.train_batch_size={batch} prompts",
                key=f"{section}.ppo_mini_batch_size",
                value=mini,
                fix=f"at most {batch}, or a larger data.train_batch_size",
            )
        if batch % mini:
            below = next(size for size in range(mini, 0, -1) if batch % size == 0)
            raise UserError(
                f"data.train_batch_size={batch} prompts do not divide into mini-batches of {mini}",
                key=f"{section}.ppo_mini_batch_size",
                value=mini,
                fix=f"a divisor of {batch}, such as {below}",
            )


@rule(Scope.UPDATES)
def rows_divide_over_devices(config: Config) -> None:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    shares = data_parallel_size(config, actor)
    for key, prompts in (
        ("data.train_batch_size", config.data.train_batch_size),
        (f"{_A}.ppo_mini_batch_size", actor.ppo_mini_batch_size),
    ):
        if (prompts * n) % shares:
            step = shares // math.gcd(shares, n)
            raise UserError(
                f"x rollout.n={n} gives {prompts * n} rows, which {shares} GPUs cannot share evenly",
                key=key,
                value=prompts,
                fix=f"use a multiple of {step}",
            )


def length_of_a_row(config: Config) -> str:
    """Names the keys that limit a row's tokens."""
    both = "data.max_prompt_length + data.max_response_length"
    return both if config.data.max_length is None else f"the smaller of data.max_length and {both}"


@rule(Scope.UPDATES)
def token_budgets_hold_one_sequence(config: Config) -> None:
    longest = row_tokens(config.data)
    group, critic = config.actor_rollout_ref, config.critic
    rollout, ref, ranks = group.rollout, group.ref, group.actor.ulysses_sequence_parallel_size
    name = "log_prob_max_token_len_per_gpu"
    budgets: list[tuple[str, bool | None, int, int]] = [
        (f"{_A}.ppo_max_token_len_per_gpu", group.actor.use_dynamic_bsz, group.actor.ppo_max_token_len_per_gpu, ranks),
        (f"{_RO}.{name}", rollout.log_prob_use_dynamic_bsz, rollout.log_prob_max_token_len_per_gpu, ranks),
    ]
    if runs_frozen_policies(config):
        ranks = ref.ulysses_sequence_parallel_size
        budgets.append(
            (f"actor_rollout_ref.ref.{name}", ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu, ranks)
        )
    for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu") if critic.enable else ():
        ranks = critic.ulysses_sequence_parallel_size
        budgets.append((f"critic.{name}", critic.use_dynamic_bsz, getattr(critic, name), ranks))
    for key, used, budget, ranks in budgets:
        if used and budget * ranks < longest:
            raise UserError(
                f"one sequence may have {length_of_a_row(config)} = {longest} tokens",
                key=key,
                value=budget,
                fix=f"at least {-(-longest // ranks)}",
            )


def trained_models(config: Config) -> Iterator[tuple[str, str, Any]]:
    """Yields section, strategy and model settings of the actor, and of the critic if there is one."""
    group, critic = config.actor_rollout_ref, config.critic
    yield _M, group.actor.strategy, group.model
    if critic.enable:
        yield "critic.model", critic.strategy, critic.model


@rule
def adapters_suit_their_engine(config: Config) -> None:
    """LoRA has other keys under Megatron; not every engine merges; its reference is the actor without adapters."""
    group = config.actor_rollout_ref
    for section, strategy, model in trained_models(config):
        megatron = strategy == "megatron"
        name, value = ("lora_rank", model.lora_rank) if megatron else ("lora.rank", model.lora.rank)
        if value:
            fix = f"{section}.lora.rank={value}" if megatron else f"{section}.lora_rank={value} {section}.lora_alpha="
            raise UserError(
                f"is {'not ' if megatron else ''}Megatron's, and the engine is {strategy}",
                key=f"{section}.{name}",
                value=value,
                fix=fix if megatron else f"{fix}{model.lora.alpha}",
            )
    if merges_adapters(group) and not computes_merged(config):
        key = f"{_M}.lora.merge"
        if not engine_kind(group.rollout.name).merges_adapters:
            raise UserError(
                f"{_RO}.name={group.rollout.name} runs adapters beside weights that are sharded",
                key=key,
                value=True,
                fix=f"{key}=False, or {_RO}.name=embedded",
            )
        if group.numerics == "exact":
            raise UserError(
                "several devices train with adapters beside the weights, and merged ones are rounded: log-probs of "
                "rollout and trainer are not equal bit for bit",
                key=key,
                value=True,
                fix=f"{key}=False, or actor_rollout_ref.numerics=fast",
            )
    ranks = group.actor.ulysses_sequence_parallel_size
    if trains_adapters(group) and needs_reference(config) and group.ref.ulysses_sequence_parallel_size != ranks:
        raise UserError(
            "under LoRA the reference is the actor without its adapters, and shares its ranks",
            key="actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            value=group.ref.ulysses_sequence_parallel_size,
            fix=f"leave it out, or {ranks}",
        )


@rule
def offloaded_activations_are_few(config: Config) -> None:
    """Only the inputs of layers are worth the way to the host; Megatron recomputes by keys of its own."""
    for section, strategy, model in trained_models(config):
        key = f"{section}.enable_activation_offload"
        if model.enable_activation_offload and strategy == "megatron":
            raise UserError("is not Megatron's", key=key, value=True, fix="leave it out, and set recompute_granularity")
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            fix = f"{section}.enable_gradient_checkpointing=True"
            raise UserError("offloads what gradient checkpointing keeps, and that is off", key=key, value=True, fix=fix)


@rule(Scope.TRAINING)
def roles_do_not_train_in_float16(config: Config) -> None:
    for role in engine_roles(config):
        section = f"{role.section}.megatron" if role.keys(config).strategy == "megatron" else role.fsdp
        no_float16(tree.get(config, section).dtype, f"{section}.dtype")


def no_float16(dtype: str, key: str) -> None:
    if dtype in ("float16", "fp16"):
        reason = "gradients in float16 need a loss scale, which this engine has not"
        raise UserError(reason, key=key, value=dtype, fix="bfloat16 or float32")


@rule(Scope.TRAINING)
def one_device_does_not_shard(config: Config) -> None:
    """FSDP2's offload needs FSDP2, which several devices run; and `single` runs on one."""
    for kind in engine_roles(config):
        if kind.section == _REF:
            continue
        role, keys = kind.keys(config), kind.fsdp
        size = pool_size(config, role)
        if size == 1 and tree.get(config, keys).offload_policy:
            raise UserError(
                "is FSDP2's, and one device runs `single`",
                key=f"{keys}.offload_policy",
                value=True,
                fix=f"{keys}.param_offload=True {keys}.optimizer_offload=True",
            )
        if size > 1 and role.strategy == "single":
            key = f"{kind.section}.strategy"
            raise UserError(f"trains on one device, and there are {size}", key=key, value="single", fix=f"{key}=fsdp")


@rule(Scope.ALONE)
def no_rollout_apart(config: Config) -> None:
    """Refuses keys of a rollout in a pool of its own, and the engine that only reinforcement learning uses."""
    if rolls_out_apart(config):
        key = "actor_rollout_ref.hybrid_engine"
        raise UserError("this command has one process", key=key, value=False, fix="leave it out")
