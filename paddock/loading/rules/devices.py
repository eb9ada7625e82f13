"""Rules on batches, devices, engines and what they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paddock.config import tree
from paddock.config.phases import CUTS
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
    splits_models,
    trains_adapters,
)
from paddock.loading.rules.form import Breach, Scope, rule

_A = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_M = "actor_rollout_ref.model"
_RO = "actor_rollout_ref.rollout"


@rule
def devices_divide_into_groups(config: Config) -> Iterator[Breach]:
    for kind in engine_roles(config):
        role = kind.keys(config)
        size, devices = model_parallel_size(role), pool_size(config, role)
        if devices % size:
            key = "megatron.tensor x pipeline x context" if splits_models(role) else "ulysses_sequence"
            reason = f"{devices} devices do not divide into groups of {size}"
            fix = f"a divisor of n_gpus_per_node x nnodes = {devices}"
            yield f"{kind.section}.{key}_parallel_size", reason, fix, size
    size, pool = engine_size(config), rollout_pool(config)
    if pool.size % size:
        reason = f"{pool.size} devices do not divide into engines of {size}"
        fix = f"a divisor of {pool.key}.n_gpus_per_node x {pool.key}.nnodes = {pool.size}"
        yield f"{_RO}.tensor_model_parallel_size", reason, fix


@rule(Scope.UPDATES)
def mini_batches_divide_the_batch(config: Config) -> Iterator[Breach]:
    batch = config.data.train_batch_size
    for section in (_A, "critic") if config.critic.enable else (_A,):
        mini = tree.get(config, key := f"{section}.ppo_mini_batch_size")
        if mini > batch:
            reason = f"a step has only data.train_batch_size={batch} prompts"
            yield key, reason, f"at most {batch}, or a larger data.train_batch_size"
        elif batch % mini:
            below = next(size for size in range(mini, 0, -1) if batch % size == 0)
            reason = f"data.train_batch_size={batch} prompts do not divide into mini-batches of {mini}"
            yield key, reason, f"a divisor of {batch}, such as {below}"


@rule(Scope.UPDATES)
def rows_divide_over_devices(config: Config) -> Iterator[Breach]:
    n = config.actor_rollout_ref.rollout.n
    shares = data_parallel_size(config, config.actor_rollout_ref.actor)
    for key in ("data.train_batch_size", f"{_A}.ppo_mini_batch_size"):
        rows = tree.get(config, key) * n
        if rows % shares:
            reason = f"x rollout.n={n} gives {rows} rows, which {shares} GPUs cannot share evenly"
            yield key, reason, f"use a multiple of {shares // math.gcd(shares, n)}"


@rule(Scope.UPDATES)
def token_budgets_hold_one_sequence(config: Config) -> Iterator[Breach]:
    longest, both = row_tokens(config.data), "data.max_prompt_length + data.max_response_length"
    limit = both if config.data.max_length is None else f"the smaller of data.max_length and {both}"
    phases = ["update_actor", "old_log_prob", *(["ref"] if runs_frozen_policies(config) else [])]
    for phase in [*phases, *(["update_critic", "values"] if config.critic.enable else [])]:
        cut = CUTS[phase]
        ranks = tree.get(config, _A if cut.section == _RO else cut.section).ulysses_sequence_parallel_size
        if tree.get(config, cut.switch_key) and tree.get(config, cut.tokens_key) * ranks < longest:
            yield (
                cut.tokens_key,
                f"one sequence may have {limit} = {longest} tokens",
                f"at least {-(-longest // ranks)}",
            )


def trained_models(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yields section, keys and model settings of the actor, and of the critic if there is one."""
    group, critic = config.actor_rollout_ref, config.critic
    yield _M, group.actor, group.model
    if critic.enable:
        yield "critic.model", critic, critic.model


@rule
def adapters_suit_their_engine(config: Config) -> Iterator[Breach]:
    """LoRA has other keys under Megatron; not every engine merges; its reference is the actor without adapters."""
    group, key = config.actor_rollout_ref, f"{_M}.lora.merge"
    for section, role, model in trained_models(config):
        if splits_models(role) and model.lora_rank:
            reason = f"is not Megatron's, and the engine is {role.strategy}"
            yield f"{section}.lora_rank", reason, f"{section}.lora.rank={model.lora_rank}"
        if not splits_models(role) and model.lora.rank:
            fix = f"{section}.lora_rank={model.lora.rank} {section}.lora_alpha={model.lora.alpha}"
            yield f"{section}.lora.rank", f"is Megatron's, and the engine is {role.strategy}", fix
    apart = merges_adapters(group) and not computes_merged(config)
    if apart and not engine_kind(group.rollout.name).merges_adapters:
        reason = f"{_RO}.name={group.rollout.name} runs adapters beside weights that are sharded"
        yield key, reason, f"{key}=False, or {_RO}.name=embedded"
    if apart and group.numerics == "exact":
        reason = (
            "several devices train with adapters beside the weights, and merged ones are rounded: log-probs of "
            "rollout and trainer are not equal bit for bit"
        )
        yield key, reason, f"{key}=False, or actor_rollout_ref.numerics=fast"
    ranks = group.actor.ulysses_sequence_parallel_size
    if trains_adapters(group) and needs_reference(config) and group.ref.ulysses_sequence_parallel_size != ranks:
        reason = "under LoRA the reference is the actor without its adapters, and shares its ranks"
        yield f"{_REF}.ulysses_sequence_parallel_size", reason, f"leave it out, or {ranks}"


@rule
def offloaded_activations_are_few(config: Config) -> Iterator[Breach]:
    """Only the inputs of layers are worth the way to the host; Megatron recomputes by keys of its own."""
    for section, role, model in trained_models(config):
        key = f"{section}.enable_activation_offload"
        if model.enable_activation_offload and splits_models(role):
            yield key, "is not Megatron's", "leave it out, and set recompute_granularity"
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            fix = f"{section}.enable_gradient_checkpointing=True"
            yield key, "offloads what gradient checkpointing keeps, and that is off", fix


@rule(Scope.TRAINING)
def roles_do_not_train_in_float16(config: Config) -> Iterator[Breach]:
    for role in engine_roles(config):
        section = f"{role.section}.megatron" if splits_models(role.keys(config)) else role.fsdp
        yield from no_float16(config, f"{section}.dtype")


def no_float16(config: Config, key: str) -> Iterator[Breach]:
    if tree.get(config, key) in ("float16", "fp16"):
        yield key, "gradients in float16 need a loss scale, which this engine has not", "bfloat16 or float32"


@rule(Scope.TRAINING)
def one_device_does_not_shard(config: Config) -> Iterator[Breach]:
    """FSDP2's offload needs FSDP2, which several devices run; and `single` runs on one."""
    for kind in engine_roles(config):
        if kind.section == _REF:
            continue
        role, keys, key = kind.keys(config), kind.fsdp, f"{kind.section}.strategy"
        size = pool_size(config, role)
        if size == 1 and tree.get(config, keys).offload_policy:
            fix = f"{keys}.param_offload=True {keys}.optimizer_offload=True"
            yield f"{keys}.offload_policy", "is FSDP2's, and one device runs `single`", fix
        if size > 1 and role.strategy == "single":
            yield key, f"trains on one device, and there are {size}", f"{key}=fsdp"


@rule(Scope.ALONE)
def no_rollout_apart(config: Config) -> Iterator[Breach]:
    """Refuses keys of a rollout in a pool of its own, and the engine that only reinforcement learning uses."""
    if rolls_out_apart(config):
        yield "actor_rollout_ref.hybrid_engine", "this command has one process", "leave it out"


@rule
def megatron_trains_all_or_none(config: Config) -> Iterator[Breach]:
    """Roles of one process share Megatron's process groups, or know nothing of them."""
    actor = config.actor_rollout_ref.actor
    for role in engine_roles(config):
        if splits_models(role.keys(config)) != splits_models(actor):
            key, engine = f"{role.section}.strategy", actor.strategy
            yield key, f"the actor's engine is {engine}, and Megatron trains all roles or none", f"{key}={engine}"


@rule(Scope.TRAINING)
def megatron_beside_other_keys(config: Config) -> Iterator[Breach]:
    """Refuses what the other engines do and Megatron's does not."""
    group = config.actor_rollout_ref
    replays, balance = group.actor.router_replay.mode, group.model.override_config.get("router_aux_loss_coef")
    asked = (
        (group.numerics == "exact", "actor_rollout_ref.numerics", "its kernels are not those of the rollout", "fast"),
        (replays != "disabled", f"{_A}.router_replay.mode", "Megatron's routers choose by themselves", "disabled"),
        (bool(balance), f"{_M}.override_config.router_aux_loss_coef", "routers are not balanced", "0"),
        (group.actor.use_prefix_grouper, f"{_A}.use_prefix_grouper",
         "a prompt is computed once for each of its responses", "False"),
    )  # fmt: skip
    for wanted, key, why, fix in asked if splits_models(group.actor) else ():
        if wanted:
            yield key, f"{why} under actor.strategy=megatron", f"{key}={fix}, or another engine"


@rule(Scope.ALONE)
def megatron_does_not_supervise(config: Config) -> Iterator[Breach]:
    """Refuses Megatron in commands beside `train`."""
    if splits_models(config.actor_rollout_ref.actor):
        key = f"{_A}.strategy"
        reason = "trains by reinforcement learning alone: supervised training and answering run FSDP or one process"
        yield key, reason, f"{key}=fsdp, or leave it out"
