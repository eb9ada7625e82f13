"""Checks on a whole config, a function a rule. Each names the key, the value, the reason and the fix."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

from paddock.config import recipes, rollout_correction, tree
from paddock.config.loggers import LOGGERS
from paddock.config.paths import files_of, missing_file
from paddock.config.rewards import absent_files, reward_parts
from paddock.config.roles import POLICY_LOSSES
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import (
    data_parallel_size,
    engine_size,
    model_parallel_size,
    needs_reference,
    pool_size,
    rollout_devices,
    rolls_out_apart,
    trains_adapters,
)
from paddock.errors import UserError

_A, _M, _RO = (f"actor_rollout_ref.{role}" for role in ("actor", "model", "rollout"))


def check(config: Config, origins: dict[str, str]) -> list[str]:
    """Raises the first broken rule; returns warnings for what is allowed but seldom meant."""
    for leaf in tree.leaves().values():
        within_limits(leaf, tree.get(config, leaf.key))
    for rule in RULES:
        rule(config)
    return [*_warnings(config, origins)]


def within_limits(leaf: tree.Leaf, value: Any) -> None:
    """The schema's own limits: choices, low <= value <= high, value > above."""
    if isinstance(value, list) and "choices" in leaf.metadata:
        for item in value:
            within_limits(leaf, item)
        return
    if value is None:
        return
    limits = leaf.metadata
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise UserError("is not a number", key=leaf.key, value=value, fix=f"{leaf.key}: {limits['meaning']}")
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in numbers):
        fix = f"{leaf.key}: {limits['meaning']}"
        raise UserError("must be a whole number of at most 64 bits", key=leaf.key, value=f"{value!s:.40}", fix=fix)
    if "choices" in limits and value not in limits["choices"]:
        nearest = difflib.get_close_matches(str(value), map(str, limits["choices"]), n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        known = ", ".join(map(str, limits["choices"]))
        raise UserError("is not one of the values it takes", key=leaf.key, value=value, fix=f"{hint}one of: {known}")
    for name, broken, sign in (
        ("low", lambda bound: value < bound, ">="),
        ("high", lambda bound: value > bound, "<="),
        ("above", lambda bound: value <= bound, ">"),
    ):
        if name in limits and broken(limits[name]):
            bound = limits[name]
            raise UserError(
                f"must be {sign} {bound}", key=leaf.key, value=value, fix=f"{leaf.key}: {limits['meaning']}"
            )


def unknown(kind: str, key: str, name: str, known: Collection[str]) -> UserError:
    """A name that nothing is registered under; a plug-in's name is known only once its module is imported."""
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    own = "your own: register it in a module named by actor_rollout_ref.model.external_lib"
    return UserError(f"no such {kind}", key=key, value=name, fix=f"{hint}known: {', '.join(known)}; {own}")


def estimator_gets_its_groups(config: Config) -> None:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if "groups" in recipes.needs_of(estimator) and n < 2:
        raise UserError(
            f"{estimator} compares the responses to one prompt with each other, and one response has no other",
            key=f"{_RO}.n",
            value=n,
            fix=f"{_RO}.n=5, or an estimator without groups (algorithm.adv_estimator=gae)",
        )


def estimator_gets_its_critic(config: Config) -> None:
    if "critic" in recipes.needs_of(config.algorithm.adv_estimator) and not config.critic.enable:
        raise UserError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic",
            key="critic.enable",
            value=config.critic.enable,
            fix="leave critic.enable out, or choose an estimator without a critic (grpo, rloo)",
        )


def estimator_gets_its_components(config: Config) -> None:
    algorithm = config.algorithm
    needs = recipes.needs_of(algorithm.adv_estimator)
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if "reward_components" in needs and not keys:
        raise UserError(
            "gdpo normalises reward components, and none is named",
            key="algorithm.gdpo_reward_keys",
            value=keys,
            fix="algorithm.gdpo_reward_keys=[accuracy,format]: keys of the dict that your scorer returns; or several "
            "functions, each of which is a component: custom_reward_function.path=[a.py,b.py]",
        )
    if weights is not None and len(weights) != len(keys):
        raise UserError(
            f"there are {len(keys)} components and {len(weights)} weights",
            key="algorithm.gdpo_reward_weights",
            value=weights,
            fix="one weight for each of algorithm.gdpo_reward_keys",
        )


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


def devices_divide_into_groups(config: Config) -> None:
    roles: list[tuple[str, Any]] = [(_A, config.actor_rollout_ref.actor)]
    if needs_reference(config):
        roles.append(("actor_rollout_ref.ref", config.actor_rollout_ref.ref))
    if config.critic.enable:
        roles.append(("critic", config.critic))
    for section, role in roles:
        size, devices = model_parallel_size(role), pool_size(config, role)
        if devices % size:
            key = "megatron.tensor x pipeline x context" if role.strategy == "megatron" else "ulysses_sequence"
            raise UserError(
                f"{devices} devices do not divide into groups of {size}",
                key=f"{section}.{key}_parallel_size",
                value=size,
                fix=f"a divisor of n_gpus_per_node x nnodes = {devices}",
            )
    size, world = engine_size(config), rollout_devices(config)
    section = _RO if rolls_out_apart(config) else "trainer"
    if world % size:
        raise UserError(
            f"{world} devices do not divide into engines of {size}",
            key=f"{_RO}.tensor_model_parallel_size",
            value=config.actor_rollout_ref.rollout.tensor_model_parallel_size,
            fix=f"a divisor of {section}.n_gpus_per_node x {section}.nnodes = {world}",
        )


def rollouts_apart_have_an_engine_and_devices(config: Config) -> None:
    """A pool of its own needs an engine that takes weights from elsewhere."""
    rollout = config.actor_rollout_ref.rollout
    if not rolls_out_apart(config):
        return
    if not engine_kind(rollout.name).copies_weights:
        raise UserError(
            f"{_RO}.name={rollout.name} runs the actor's own weights, on the actor's devices",
            key="actor_rollout_ref.hybrid_engine",
            value=False,
            fix=f"{_RO}.name=vllm or sglang, or leave it out",
        )
    if rollout.nnodes == 0:
        raise UserError("its pool has no node", key=f"{_RO}.nnodes", value=0, fix=f"{_RO}.nnodes=1")


def megatron_trains_all_or_none(config: Config) -> None:
    """Roles of one process share Megatron's process groups, or know nothing of them."""
    group, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor.strategy
    for section, role, there in (
        ("actor_rollout_ref.ref", group.ref, needs_reference(config)),
        ("critic", config.critic, config.critic.enable),
    ):
        if there and (role.strategy == "megatron") != (actor == "megatron"):
            raise UserError(
                f"the actor's engine is {actor}, and Megatron trains all roles or none",
                key=f"{section}.strategy",
                value=role.strategy,
                fix=f"{section}.strategy={actor}",
            )


def token_budgets_hold_one_sequence(config: Config) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    group, critic = config.actor_rollout_ref, config.critic
    rollout, ref, ranks = group.rollout, group.ref, group.actor.ulysses_sequence_parallel_size
    name = "log_prob_max_token_len_per_gpu"
    budgets: list[tuple[str, bool | None, int, int]] = [
        (f"{_A}.ppo_max_token_len_per_gpu", group.actor.use_dynamic_bsz, group.actor.ppo_max_token_len_per_gpu, ranks),
        (f"{_RO}.{name}", rollout.log_prob_use_dynamic_bsz, rollout.log_prob_max_token_len_per_gpu, ranks),
    ]
    if needs_reference(config):
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
                f"one sequence may have data.max_prompt_length + data.max_response_length = {longest} tokens",
                key=key,
                value=budget,
                fix=f"at least {-(-longest // ranks)}",
            )


def losses_have_what_they_need(config: Config) -> None:
    loss, key = config.actor_rollout_ref.actor.policy_loss, f"{_A}.policy_loss"
    if loss.loss_mode not in POLICY_LOSSES and not config.actor_rollout_ref.model.external_lib:
        raise unknown("policy loss", f"{key}.loss_mode", loss.loss_mode, POLICY_LOSSES)
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        raise UserError(
            "loss_mode=dro has no default weight", key=f"{key}.dro_beta", value="null", fix=f"{key}.dro_beta=0.1"
        )
    if loss.loss_mode == "bypass_mode" and not rollout_correction.parse(config.algorithm.rollout_correction).bypass:
        raise UserError(
            "this loss compares with the rollout policy directly",
            key=f"{key}.loss_mode",
            value=loss.loss_mode,
            fix="algorithm.rollout_correction.bypass_mode=True",
        )


def correction_can_be_read(config: Config) -> None:
    rollout_correction.parse(config.algorithm.rollout_correction)


def replayed_experts_are_recorded(config: Config) -> None:
    """R3 replays what the rollout chose, R2 what the pass of the old log-probs chose."""
    group, key = config.actor_rollout_ref, "actor_rollout_ref.actor.router_replay.mode"
    recorded = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    if group.actor.router_replay.mode == "R3" and not group.rollout.enable_rollout_routing_replay:
        raise UserError("replays the rollout's experts, which nobody records", key=key, value="R3", fix=recorded)
    if group.actor.router_replay.mode == "R2" and rollout_correction.parse(config.algorithm.rollout_correction).bypass:
        raise UserError(
            "replays the experts of the old log-probs' pass, which bypass mode leaves out",
            key=key,
            value="R2",
            fix=f"{key}=R3 {recorded}; or algorithm.rollout_correction.bypass_mode=False",
        )


def sampling_is_possible(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    for key, top_k in ((f"{_RO}.top_k", rollout.top_k), (f"{_RO}.val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k < 1 and top_k != -1:
            raise UserError("is not a number of tokens", key=key, value=top_k, fix="-1 for all, or at least 1")
    validation = rollout.val_kwargs
    if validation.n > 1 and not validation.do_sample:
        raise UserError(
            "greedy answers to one prompt are all the same",
            key=f"{_RO}.val_kwargs.n",
            value=validation.n,
            fix=f"{_RO}.val_kwargs.do_sample=True and a temperature",
        )
    if validation.do_sample and validation.temperature == 0:
        raise UserError(
            "sampling needs a temperature",
            key=f"{_RO}.val_kwargs.temperature",
            value=0,
            fix=f"{_RO}.val_kwargs.temperature=1.0",
        )


def frequencies_are_positive_or_off(config: Config) -> None:
    for name in ("test_freq", "save_freq"):
        if getattr(config.trainer, name) == 0:
            raise UserError("every 0 steps", key=f"trainer.{name}", value=0, fix="a number of steps, or -1 for never")


def row_limits_are_positive_or_off(config: Config) -> None:
    for name in ("train_max_samples", "val_max_samples"):
        most = getattr(config.data, name)
        if most < 1 and most != -1:
            raise UserError("is not a number of rows", key=f"data.{name}", value=most, fix="-1 for all, or at least 1")


def loggers_are_known(config: Config) -> None:
    value = config.trainer.logger
    for name in value if isinstance(value, list) else [value]:
        if name not in LOGGERS:
            nearest = difflib.get_close_matches(str(name), LOGGERS, n=1)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            raise UserError(
                "no such logger", key="trainer.logger", value=name, fix=f"{hint}known: {', '.join(LOGGERS)}"
            )


def resume_path_is_a_step(config: Config) -> None:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and "global_step_" not in str(trainer.resume_from_path):
        raise UserError(
            "resume_mode=resume_path needs the folder of a step",
            key="trainer.resume_from_path",
            value=trainer.resume_from_path,
            fix="trainer.resume_from_path=checkpoints/.../global_step_N",
        )


def checkpoints_are_whole(config: Config) -> None:
    """All of model, optimizer and the rest: with less, a run would not go on as if it had not stopped."""
    parts, known = ("model", "optimizer", "extra"), ("model", "optimizer", "extra", "hf_model")
    for role in ("actor_rollout_ref.actor", "critic"):
        for name in ("save_contents", "load_contents"):
            key = f"{role}.checkpoint.{name}"
            value = tree.get(config, key)
            if value is None:
                continue
            for word in value:
                if word not in known:
                    raise UserError("no such part", key=key, value=word, fix=f"some of {', '.join(known)}")
            if not set(parts) <= set(value):
                missing = next(part for part in parts if part not in value)
                raise UserError(
                    f"a checkpoint is always whole, and {missing} is left out",
                    key=key,
                    value=list(value),
                    fix=f"{key}=[{','.join(parts)}]; weights alone come from `paddock export`",
                )


def adapters_suit_their_engine(config: Config) -> None:
    """LoRA has other keys under Megatron; and its reference is the actor without adapters."""
    group, critic = config.actor_rollout_ref, config.critic
    roles: list[tuple[str, str, Any]] = [(_M, group.actor.strategy, group.model)]
    if critic.enable:
        roles.append(("critic.model", critic.strategy, critic.model))
    for section, strategy, model in roles:
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
    ranks = group.actor.ulysses_sequence_parallel_size
    if trains_adapters(config) and needs_reference(config) and group.ref.ulysses_sequence_parallel_size != ranks:
        raise UserError(
            "under LoRA the reference is the actor without its adapters, and shares its ranks",
            key="actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            value=group.ref.ulysses_sequence_parallel_size,
            fix=f"leave it out, or {ranks}",
        )


def offloaded_activations_are_few(config: Config) -> None:
    """Only the inputs of layers are worth the way to the host; Megatron recomputes by keys of its own."""
    group, critic = config.actor_rollout_ref, config.critic
    roles: list[tuple[str, str, Any]] = [(_M, group.actor.strategy, group.model)]
    if critic.enable:
        roles.append(("critic.model", critic.strategy, critic.model))
    for section, strategy, model in roles:
        key = f"{section}.enable_activation_offload"
        if model.enable_activation_offload and strategy == "megatron":
            raise UserError("is not Megatron's", key=key, value=True, fix="leave it out, and set recompute_granularity")
        if model.enable_activation_offload and not model.enable_gradient_checkpointing:
            fix = f"{section}.enable_gradient_checkpointing=True"
            raise UserError("offloads what gradient checkpointing keeps, and that is off", key=key, value=True, fix=fix)


def reward_model_is_named(config: Config) -> None:
    reward, judge = config.reward_model, config.reward_model.judge
    if not reward.enable:
        if judge.source is not None:
            raise UserError(
                "only an enabled reward model can judge",
                key="reward_model.judge.source",
                value=judge.source,
                fix="reward_model.enable=True",
            )
        return
    if judge.source == "endpoint":
        for key, value in (("reward_model.judge.url", judge.url), ("reward_model.judge.model", judge.model)):
            if not value:
                raise UserError("reward_model.judge.source=endpoint needs it", key=key, value=value, fix=f"{key}=...")
        if not str(judge.url).startswith(("http://", "https://")):
            raise UserError(
                "is not an address", key="reward_model.judge.url", value=judge.url, fix="http://host:port/v1"
            )
    elif not reward.model.path:
        raise UserError("has no model", key="reward_model.enable", value=True, fix="reward_model.model.path=...")


def reward_settings_agree(config: Config) -> None:
    """What would be set and not used is named."""
    reward, judge = config.reward_model, config.reward_model.judge
    if not reward.enable:
        return
    clashes: tuple[tuple[bool, str, Any, str, str], ...] = (
        (judge.source == "endpoint" and bool(reward.model.path), "reward_model.model.path", reward.model.path,
         "the judge is the server at reward_model.judge.url", "leave it out, or reward_model.judge.source=engine"),
        (judge.source != "endpoint" and bool(judge.url), "reward_model.judge.url", judge.url,
         "no server is asked", "reward_model.judge.source=endpoint, or leave it out"),
        (judge.source is not None and reward.token_level, "reward_model.token_level", True,
         "a judge gives one score for a response", "leave it out"),
        (reward.model_weight is None and reward.rule_weight is not None, "reward_model.rule_weight", reward.rule_weight,
         "the model's weight is not set", "reward_model.model_weight=1"),
    )  # fmt: skip
    for broken, key, value, reason, fix in clashes:
        if broken:
            raise UserError(reason, key=key, value=value, fix=fix)


def data_files_are_named(config: Config) -> None:
    for key in ("data.train_files", "data.val_files"):
        value = tree.get(config, key)
        paths = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(path, str) for path in paths):
            raise UserError(
                "is not a path or a list of paths", key=key, value=value, fix=f"{key}=['a.parquet','b.parquet']"
            )


def weights_suit_the_files(config: Config) -> None:
    data, key = config.data, "data.train_weights"
    if data.train_weights is None:
        return
    files = files_of(data.train_files)
    if len(data.train_weights) != len(files):
        reason = f"there are {len(files)} in data.train_files and {len(data.train_weights)} weights"
        raise UserError(reason, key=key, value=data.train_weights, fix=f"{key}=[{','.join('1' for _ in files)}]")
    if any(not weight > 0 for weight in data.train_weights):
        reason = "a weight must be above 0"
        raise UserError(reason, key=key, value=data.train_weights, fix="leave a file out of data.train_files instead")
    for other in ("data.sampler.class_path", "data.custom_cls.path"):
        if tree.get(config, other):
            reason = f"{other} decides which rows come, and in which order"
            raise UserError(reason, key=key, value=data.train_weights, fix=f"leave one of the two out: ~{key}")


def plugin_files_exist(config: Config) -> None:
    """Python files that a run imports are looked for at once: a wrong path is the commonest mistake."""
    for path in absent_files(config):
        raise missing_file("custom_reward_function.path", path)
    for key in ("data.custom_cls.path", "data.sampler.class_path"):
        path = tree.get(config, key)
        if path and not path.startswith("pkg://") and not os.path.isfile(path):
            raise missing_file(key, path)


def rewards_have_names_and_weights(config: Config) -> None:
    if reward_parts(config) and config.reward_model.compute_score_kwargs:
        rules = config.reward is not None
        raise UserError(
            f"its arguments are for rules that data_source picks, and {'`reward`' if rules else 'your own function'} "
            "scores every row",
            key="reward_model.compute_score_kwargs",
            value=dict(config.reward_model.compute_score_kwargs),
            fix="reward_kwargs" if rules else "custom_reward_function.reward_kwargs",
        )
    if config.reward_kwargs and config.reward is None:
        raise UserError(
            "its arguments are for the rules of `reward`, and none is named",
            key="reward_kwargs",
            value=dict(config.reward_kwargs),
            fix="reward=regex, or reward_model.compute_score_kwargs for the rules that data_source picks",
        )


RULES: tuple[Callable[[Config], None], ...] = (
    estimator_gets_its_groups,
    estimator_gets_its_critic,
    estimator_gets_its_components,
    rollouts_apart_have_an_engine_and_devices,
    devices_divide_into_groups,
    mini_batches_divide_the_batch,
    rows_divide_over_devices,
    megatron_trains_all_or_none,
    token_budgets_hold_one_sequence,
    losses_have_what_they_need,
    correction_can_be_read,
    replayed_experts_are_recorded,
    sampling_is_possible,
    frequencies_are_positive_or_off,
    row_limits_are_positive_or_off,
    loggers_are_known,
    resume_path_is_a_step,
    checkpoints_are_whole,
    adapters_suit_their_engine,
    offloaded_activations_are_few,
    reward_model_is_named,
    reward_settings_agree,
    data_files_are_named,
    weights_suit_the_files,
    plugin_files_exist,
    rewards_have_names_and_weights,
)


COPIES_ONLY = (
    *("gpu_memory_utilization", "pipeline_model_parallel_size", "data_parallel_size", "expert_parallel_size"),
    *("enable_chunked_prefill", "enable_prefix_caching", "cudagraph_capture_sizes", "load_format", "logprobs_mode"),
    *("scheduling_policy", "disable_log_stats", "multi_stage_wake_up", "checkpoint_engine.", "engine_kwargs."),
)
"""Keys of the rollout, or sections, that only an engine with a copy of the weights reads."""


def _warnings(config: Config, origins: dict[str, str]) -> Iterator[str]:
    """Keys that the user set and that this run does not read."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    other = ".fsdp_config." if actor.strategy == "megatron" else ".megatron."
    for key in (key for key, origin in origins.items() if set_by_user(origin)):
        if other in key:
            yield f"{key} has no effect: {_A}.strategy={actor.strategy}"
        elif ".model.lora." in key and actor.strategy != "megatron" and key != f"{_M}.lora.merge":
            yield f"{key} has no effect: it is Megatron's, and {_A}.strategy={actor.strategy}"
        elif key.startswith("critic.") and key != "critic.enable" and not config.critic.enable:
            yield f"{key} has no effect: algorithm.adv_estimator={config.algorithm.adv_estimator} trains no critic"
        elif key.startswith("reward_model.rollout.") and config.reward_model.judge.source is None:
            yield f"{key} has no effect: no judge writes; a classifier runs without an engine of its own"
        elif key == f"{_RO}.tensor_model_parallel_size" and engine_size(config) < (tree.get(config, key) or 1):
            yield f"{key}={tree.get(config, key)} has no effect: {_RO}.name={rollout.name} runs on one device"
        elif not engine_kind(rollout.name).copies_weights and key.startswith(
            tuple(f"{_RO}.{name}" for name in COPIES_ONLY)
        ):
            yield f"{key} has no effect: {_RO}.name={rollout.name} runs the actor's own weights"
        elif key in (f"{_RO}.nnodes", f"{_RO}.n_gpus_per_node") and not rolls_out_apart(config):
            yield f"{key} has no effect: actor and rollout share devices, actor_rollout_ref.hybrid_engine=True"


def set_by_user(origin: str) -> bool:
    return origin == "command line" or origin.endswith((".yaml", ".yml"))
