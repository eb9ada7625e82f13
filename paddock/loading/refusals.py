"""Settings that `paddock plan` understands and training refuses. `preflight` raises them, a plan shows them.

A rule of rules/ holds for both; these hold for training alone, so that a launch script can be planned before every
part that it asks for is built. What no version will honour is refused in verl/keys.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from paddock.config import tree
from paddock.config.conversations import converses, environments_named, paths_of
from paddock.config.engine import FrozenMegatronConfig
from paddock.config.rewards import PYTHON, reward_parts
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import (
    engine_size,
    estimator_needs,
    in_one_process,
    pool_size,
    rolls_out_apart,
    runs_frozen_policies,
)
from paddock.errors import UserError

_A, _REF, _RO, _M = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout", "model"))
_REPLAY = (
    "choices of experts travel within a step, and no file holds them",
    f"leave it out; {_A}.router_replay.mode=R3",
)

NOT_BUILT: dict[str, tuple[str, str]] = {
    f"{_A}.router_replay.record_file": _REPLAY,
    f"{_A}.router_replay.replay_file": _REPLAY,
    f"{_RO}.over_sample_rate": ("every response that is started is finished", "leave it out"),
    f"{_RO}.quantization": (f"the engine's weights have the type {_RO}.dtype", "leave it out"),
    f"{_RO}.prometheus.enable": (
        "engines serve no metrics", "leave it out; trainer.logger=[console,prometheus] serves those of the run"
    ),
    "reward_model.ulysses_sequence_parallel_size": ("one device reads a whole sequence", "leave it out"),
    "global_profiler.tool": (
        "no profiler is started", "leave it out; metrics.jsonl has the seconds of every phase of a step"
    ),
    "trainer.esi_redundant_time": (
        "a run does not ask when its lease ends", "leave it out; on SIGTERM a run writes a checkpoint and stops"
    ),
}  # fmt: skip
"""Reason and fix by key: refused unless the key has its default."""
NOT_FOR_COPIES = (
    f"{_RO}.enable_rollout_routing_replay",
    f"{_RO}.data_parallel_size",
    f"{_RO}.checkpoint_engine.backend",
    f"{_RO}.checkpoint_engine.engine_kwargs",
)
"""Keys that no engine with a copy of the weights honours."""


def refused(config: Config) -> Iterator[UserError]:
    """Yields what training refuses: every key that is not built, and one error for each function of REFUSALS."""
    yield from not_built(config)
    for rule in REFUSALS:
        try:
            rule(config)
        except UserError as error:
            yield error


def not_built(config: Config) -> Iterator[UserError]:
    default, engine = Config(), config.actor_rollout_ref.rollout.name
    kind = engine_kind(engine)
    unsupported = [*NOT_FOR_COPIES] if kind.copies_weights else []
    if kind.copies_weights and not kind.splits_experts:
        unsupported.append(f"{_RO}.expert_parallel_size")
    unsupported += [] if kind.stop_strings else [f"{_RO}.stop"]
    unsupported += [] if kind.min_tokens else [f"{_RO}.min_tokens"]
    reasons = {key: (f"is not built yet: {why}", fix) for key, (why, fix) in NOT_BUILT.items()}
    reasons |= {key: (f"is not built yet for {engine}", "leave it out") for key in unsupported}
    for key, (why, fix) in reasons.items():
        if (value := tree.get(config, key)) != tree.get(default, key):
            yield UserError(why, key=key, value=value, fix=fix)


def checkpoints_wait_for_steps(config: Config) -> None:
    for key in (f"{_A}.checkpoint.async_save", "critic.checkpoint.async_save"):
        if tree.get(config, key):
            raise UserError(
                "checkpoints are written between steps, not while the next one runs",
                key=key,
                value=True,
                fix=f"{key}=False; a larger trainer.save_freq makes saving cheaper",
            )


def roles_do_not_train_in_float16(config: Config) -> None:
    for section, role in trained(config):
        keys = "megatron" if role.strategy == "megatron" else "fsdp_config"
        holder = role.model if section == "critic" and keys == "fsdp_config" else role
        name = f"{section}.model" if holder is not role else section
        no_float16(getattr(holder, keys).dtype, f"{name}.{keys}.dtype")


def no_float16(dtype: str, key: str) -> None:
    if dtype in ("float16", "fp16"):
        reason = "gradients in float16 need a loss scale, which this engine has not"
        raise UserError(reason, key=key, value=dtype, fix="bfloat16 or float32")


def one_device_does_not_shard(config: Config) -> None:
    """FSDP2's offload needs FSDP2, which several devices run; and `single` runs on one."""
    for section, role in trained(config):
        if section == _REF:
            continue
        size, keys = pool_size(config, role), f"{'critic.model' if section == 'critic' else section}.fsdp_config"
        if size == 1 and tree.get(config, f"{keys}.offload_policy"):
            raise UserError(
                "is FSDP2's, and one device runs `single`",
                key=f"{keys}.offload_policy",
                value=True,
                fix=f"{keys}.param_offload=True {keys}.optimizer_offload=True",
            )
        if size > 1 and role.strategy == "single":
            key = f"{section}.strategy"
            raise UserError(f"trains on one device, and there are {size}", key=key, value="single", fix=f"{key}=fsdp")


def megatron_is_asked_for_what_it_does(config: Config) -> None:
    for section, role in trained(config):
        if role.strategy == "megatron":
            megatron_keys(role.megatron, f"{section}.megatron")
    if config.actor_rollout_ref.actor.strategy == "megatron":
        megatron_beside_other_keys(config)


def megatron_keys(config: FrozenMegatronConfig, section: str) -> None:
    """Refuses fields of Megatron that this engine does not honour."""
    reasons = {
        "virtual_pipeline_model_parallel_size": (
            config.virtual_pipeline_model_parallel_size in (None, 1),
            "a pipeline rank has one run of layers",
            "leave it out",
        ),
        "use_dist_checkpointing": (
            not config.use_dist_checkpointing,
            "weights start from Hugging Face's files, which any layout reads",
            "False, and actor_rollout_ref.model.path names the Hugging Face folder",
        ),
        "override_ddp_config": (
            not config.override_ddp_config,
            "Megatron's DistributedDataParallel is not in use: gradients are summed once a step",
            "leave it out",
        ),
        "override_mcore_model_config": (
            not config.override_mcore_model_config,
            "the model's arguments follow from its Hugging Face config",
            "override_transformer_config, or model.override_config",
        ),
    }
    for name, (harmless, why, fix) in reasons.items():
        if not harmless:
            raise UserError(why, key=f"{section}.{name}", value=getattr(config, name), fix=fix)
    no_float16(config.dtype, f"{section}.dtype")


def megatron_beside_other_keys(config: Config) -> None:
    """Refuses what the other engines do and Megatron's does not."""
    group = config.actor_rollout_ref
    balance = group.model.override_config.get("router_aux_loss_coef")
    asked: dict[str, tuple[Any, str, str]] = {
        "actor_rollout_ref.numerics": (group.numerics == "exact", "its kernels are not those of the rollout", "fast"),
        f"{_A}.router_replay.mode": (
            group.actor.router_replay.mode != "disabled", "Megatron's routers choose by themselves", "disabled"
        ),
        f"{_M}.override_config.router_aux_loss_coef": (bool(balance), "routers are not balanced", "0"),
        f"{_A}.use_prefix_grouper": (
            group.actor.use_prefix_grouper, "a prompt is computed once for each of its responses", "False"
        ),
    }  # fmt: skip
    for key, (wanted, why, fix) in asked.items():
        if wanted:
            raise UserError(f"{why} under actor.strategy=megatron", key=key, fix=f"{key}={fix}, or another engine")


def routers_are_balanced_by_the_engine(config: Config) -> None:
    """Refuses transformers' own loss of routers: it is a mean over whatever micro-batch a forward happens to have."""
    if config.actor_rollout_ref.model.override_config.get("output_router_logits"):
        raise UserError(
            "routers are balanced over the whole mini-batch, by a loss of this engine's own",
            key=f"{_M}.override_config.output_router_logits",
            value=True,
            fix=f"{_M}.override_config.router_aux_loss_coef=0.001",
        )


def limited_calls_are_a_functions(config: Config) -> None:
    """Only calls of the user's own functions are limited; built-in rules run in processes of this machine."""
    manager = config.reward_model.reward_manager
    if manager == "rate_limited" and not any(part.path for part in reward_parts(config)):
        raise UserError(
            "limits the calls of a function of your own, and none is named",
            key="reward_model.reward_manager",
            value=manager,
            fix="custom_reward_function.path=my_reward.py, or reward_model.reward_manager=naive",
        )
    own = next((part for part in reward_parts(config) if part.path == PYTHON), None)
    if manager == "rate_limited" and own is not None:
        raise UserError(
            f"limits calls in processes, and {own.function} is a function of this program, which runs in a thread",
            key="reward_model.reward_manager",
            value=manager,
            fix="put the function into a module that can be imported; or reward_model.reward_manager=naive",
        )


def reward_model_has_devices_and_an_engine(config: Config) -> None:
    reward = config.reward_model
    if not reward.enable or reward.judge.source == "endpoint":
        return
    if reward.enable_resource_pool and reward.nnodes == 0:
        raise UserError("its pool has no node", key="reward_model.nnodes", value=0, fix="reward_model.nnodes=1")
    if reward.strategy == "megatron":
        key = "reward_model.strategy"
        raise UserError("is not built yet", key=key, value="megatron", fix=f"{key}=fsdp, on one device")
    if reward.judge.source is None:
        no_float16(reward.model.fsdp_config.dtype, "reward_model.model.fsdp_config.dtype")


def judge_runs_in_this_process(config: Config) -> None:
    """A judge of the run's own is loaded beside the other roles, and generates by their engines."""
    reward, limits = config.reward_model, config.reward_model.rollout
    if not reward.enable or reward.judge.source != "engine":
        return
    elsewhere = "serve the judge and use reward_model.judge.source=endpoint"
    for name in ("tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size"):
        if (size := getattr(limits, name)) != 1:
            key = f"reward_model.rollout.{name}"
            reason = "the judge shares the one device of a run"
            raise UserError(reason, key=key, value=size, fix=f"leave it at 1, or {elsewhere}")
    if engine_kind(limits.name).copies_weights:
        key = "reward_model.rollout.name"
        reason = "does not serve a judge in this process"
        raise UserError(reason, key=key, value=limits.name, fix=f"{key}=embedded, or {elsewhere}")


def served_log_probs_are_those_of_the_temperature(config: Config) -> None:
    """An engine with a copy of the weights reports log-probs at one point of its sampler: training needs them after
    temperature and before top-k, top-p, min-p and min_tokens."""
    rollout = config.actor_rollout_ref.rollout
    kind = engine_kind(rollout.name)
    if not kind.copies_weights or rollout.temperature == 1.0:
        return
    filtered = rollout.do_sample and (rollout.top_k > 0 or rollout.top_p < 1.0 or rollout.min_p > 0.0)
    if (filtered or rollout.min_tokens) and not kind.unfiltered_log_probs:
        raise UserError(
            f"beside top_k, top_p, min_p or min_tokens, {rollout.name} reports log-probs only of what these leave",
            key=f"{_RO}.temperature",
            value=rollout.temperature,
            fix=f"{_RO}.temperature=1.0; or {_RO}.top_k=-1 {_RO}.top_p=1.0 {_RO}.min_p=0 {_RO}.min_tokens=0; "
            f"or {_RO}.name=embedded",
        )
    if rollout.logprobs_mode == "raw_logprobs":
        raise UserError(
            f"log-probs would not be those of temperature {rollout.temperature}, at which tokens are drawn",
            key=f"{_RO}.logprobs_mode",
            value=rollout.logprobs_mode,
            fix=f"{_RO}.logprobs_mode=processed_logprobs",
        )


def responses_have_no_priorities(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    kind = engine_kind(rollout.name)
    if kind.copies_weights and not kind.priorities and rollout.scheduling_policy != "fcfs":
        raise UserError(
            "responses have no priorities",
            key=f"{_RO}.scheduling_policy",
            value=rollout.scheduling_policy,
            fix=f"{_RO}.scheduling_policy=fcfs, or an order of SGLang's own by {_RO}.engine_kwargs.sglang",
        )


def conversations_have_what_they_need(config: Config) -> None:
    """Refuses what cannot serve several turns of the policy, where the config asks for them."""
    if not converses(config):
        return
    estimator, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    if "one_turn" in estimator_needs(config):
        raise UserError(
            "its baseline of a token is over responses of one turn",
            key="algorithm.adv_estimator",
            value=estimator,
            fix=f"algorithm.adv_estimator=tir_{estimator}",
        )
    if rollout.enable_rollout_routing_replay:
        raise UserError(
            "the experts of tokens that an environment wrote are not recorded",
            key=f"{_RO}.enable_rollout_routing_replay",
            value=True,
            fix=f"leave it out; {_A}.router_replay.mode=R2 replays experts of the trainer's own pass",
        )
    if engine_size(config) > 1:
        raise UserError(
            "conversations are driven in the process of their engine, and this one has several",
            key=f"{_RO}.tensor_model_parallel_size",
            value=rollout.tensor_model_parallel_size,
            fix=f"{_RO}.tensor_model_parallel_size=1: each device then has an engine of its own",
        )
    environments = environments_named(config).values()
    own = [*environments, *paths_of(rollout.multi_turn.function_tool_path)]
    if not in_one_process(config) and (here := [path for path in own if path.startswith(f"{PYTHON}:")]):
        raise UserError(
            "is of the program that runs, and other processes cannot import it",
            key="environment" if here[0] in environments else f"{_RO}.multi_turn.function_tool_path",
            value=here[0],
            fix="put it into a module or a file, and name that",
        )


def megatron_does_not_supervise(config: Config) -> None:
    """Refuses Megatron in commands beside `train`."""
    if config.actor_rollout_ref.actor.strategy == "megatron":
        reason = "trains by reinforcement learning alone: supervised training and answering run FSDP or one process"
        raise UserError(reason, key=f"{_A}.strategy", value="megatron", fix=f"{_A}.strategy=fsdp, or leave it out")


def trained(config: Config) -> list[tuple[str, Any]]:
    """The roles that a training engine runs, with their sections."""
    group = config.actor_rollout_ref
    roles: list[tuple[str, Any]] = [(_A, group.actor)]
    roles += [(_REF, group.ref)] if runs_frozen_policies(config) else []
    return roles + ([("critic", config.critic)] if config.critic.enable else [])


REFUSALS: tuple[Callable[[Config], None], ...] = (
    checkpoints_wait_for_steps,
    roles_do_not_train_in_float16,
    one_device_does_not_shard,
    megatron_is_asked_for_what_it_does,
    routers_are_balanced_by_the_engine,
    limited_calls_are_a_functions,
    reward_model_has_devices_and_an_engine,
    judge_runs_in_this_process,
    served_log_probs_are_those_of_the_temperature,
    responses_have_no_priorities,
    conversations_have_what_they_need,
)


def no_rollout_apart(config: Config) -> None:
    """Refuses keys of a rollout in a pool of its own, and the engine that only reinforcement learning uses."""
    if rolls_out_apart(config):
        key = "actor_rollout_ref.hybrid_engine"
        raise UserError("this command has one process", key=key, value=False, fix="leave it out")
    megatron_does_not_supervise(config)
