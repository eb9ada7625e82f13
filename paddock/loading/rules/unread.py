"""Warnings for keys that the user set and that this run does not read."""

from __future__ import annotations

from collections.abc import Iterator

from paddock.config import tree
from paddock.config.conversations import converses
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import (
    engine_size,
    learns_from_rewards,
    rolls_out_apart,
    rolls_out_beside,
    splits_models,
    trains_adapters,
)
from paddock.facts.models import shape_of
from paddock.loading.overrides import LINE, PROGRAM
from paddock.loading.rules.run import PARTS

_A = "actor_rollout_ref.actor"
_M = "actor_rollout_ref.model"
_RO = "actor_rollout_ref.rollout"
_D = "distillation.distillation_loss"

COPIES_ONLY = tuple(f"{_RO}.{name}" for name in (
    "gpu_memory_utilization", "pipeline_model_parallel_size", "data_parallel_size", "expert_parallel_size",
    "enable_chunked_prefill", "enable_prefix_caching", "cudagraph_capture_sizes", "load_format", "logprobs_mode",
    "scheduling_policy", "disable_log_stats", "multi_stage_wake_up", "checkpoint_engine.", "engine_kwargs.",
))  # fmt: skip
"""Keys of the rollout, or sections, that only an engine with a copy of the weights reads."""
SWITCHED = {"algorithm.kl_ctrl.kl_coef": "algorithm.use_kl_in_reward", f"{_A}.kl_loss_coef": f"{_A}.use_kl_loss"}
"""Weights of terms, and the switch without which a term is not there."""
SMALL, FOR_LARGE = 20_000_000, 1e-5
"""Parameters below which a model learns next to nothing at rates of large ones, and the largest of these."""
OF_REWARDS = (f"{_A}.use_kl_loss", f"{_A}.entropy_coeff", f"{_A}.policy_loss.loss_mode", "algorithm.use_kl_in_reward")
"""Keys of the policy loss, which only a run that learns from rewards has."""


def done_otherwise(config: Config) -> Iterator[str]:
    """Yields a warning for each key that has another effect than was meant."""
    validation = config.actor_rollout_ref.rollout.val_kwargs
    if validation.n > 1 and not validation.do_sample:
        yield (
            f"{_RO}.val_kwargs.n={validation.n}: greedy answers to one prompt are all the same, and one would do; "
            f"to sample them, set {_RO}.val_kwargs.do_sample=True and a temperature"
        )
    if config.algorithm.staleness and not engine_kind(config.actor_rollout_ref.rollout.name).keeps_parts:
        name = config.actor_rollout_ref.rollout.name
        yield f"{_RO}.name={name}: it draws a response anew that a step interrupts, so that little runs ahead"
    for role in (_A, "critic") if config.critic.enable else (_A,):
        saved = tree.get(config, f"{role}.checkpoint.save_contents")
        if missing := [part for part in PARTS if part not in saved]:
            yield (
                f"{role}.checkpoint.save_contents=[{','.join(saved)}]: a checkpoint also holds "
                f"{', '.join(missing)}, so that a run can go on from it; transformers loads its weights as they are"
            )


def small_models_learn_slowly(config: Config, origins: dict[str, str]) -> Iterator[str]:
    """Tells of a learning rate for large models that nobody chose for a small one."""
    key, shape = f"{_A}.optim.lr", shape_of(config.actor_rollout_ref.model.path or "")
    rate = config.actor_rollout_ref.actor.optim.lr
    if shape and shape.parameters < SMALL and rate <= FOR_LARGE and not set_by_user(origins.get(key, "")):
        size = f"{shape.parameters / 1e6:.2g} million parameters"
        yield f"{key}={rate:g} is verl's default, for large models; for {size} {key}=5e-4 is usual"


def without_effect(config: Config, origins: dict[str, str]) -> Iterator[str]:
    """Yields a warning for each key that the user set and that this run does not read."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    talks = converses(rollout, config.environment)
    other = ".fsdp_config." if splits_models(actor) else ".megatron."
    for key in (key for key, origin in origins.items() if set_by_user(origin)):
        if other in key:
            yield f"{key} has no effect: {_A}.strategy={actor.strategy}"
        elif key in SWITCHED and tree.get(config, key) and not tree.get(config, SWITCHED[key]):
            yield f"{key}={tree.get(config, key):g} has no effect: {SWITCHED[key]}=False"
        elif key == f"{_M}.lora.merge" and not trains_adapters(config.actor_rollout_ref):
            yield f"{key} has no effect: the actor has no adapters"
        elif ".model.lora." in key and not splits_models(actor) and key != f"{_M}.lora.merge":
            yield f"{key} has no effect: it is Megatron's, and {_A}.strategy={actor.strategy}"
        elif key.startswith("critic.") and key != "critic.enable" and not config.critic.enable:
            yield f"{key} has no effect: algorithm.adv_estimator={config.algorithm.adv_estimator} trains no critic"
        elif key.startswith("reward_model.rollout.") and config.reward_model.judge.source is None:
            yield f"{key} has no effect: no judge writes; a classifier runs without an engine of its own"
        elif key == f"{_RO}.tensor_model_parallel_size" and engine_size(config) < (tree.get(config, key) or 1):
            yield f"{key}={tree.get(config, key)} has no effect: {_RO}.name={rollout.name} runs on one device"
        elif key.startswith(COPIES_ONLY) and not engine_kind(rollout.name).copies_weights:
            yield f"{key} has no effect: {_RO}.name={rollout.name} runs the actor's own weights"
        elif key.startswith((f"{_RO}.multi_turn.", f"{_RO}.deterministic")) and not talks:
            yield f"{key} has no effect on rows without agent_name: set environment, or {_RO}.multi_turn.enable=True"
        elif key == f"{_RO}.multi_turn.function_tool_path" and config.environment:
            yield f"{key} has no effect on rows without agent_name: an environment has its own tools"
        elif key == "environment_kwargs" and not config.environment:
            yield "environment_kwargs has no effect: no environment is named"
        elif key in (f"{_RO}.nnodes", f"{_RO}.n_gpus_per_node") and not rolls_out_apart(config):
            yield f"{key} has no effect: actor and rollout share processes, actor_rollout_ref.hybrid_engine=True"
        elif key == f"{_RO}.n_gpus_per_node" and rolls_out_beside(config):
            yield f"{key} has no effect: the rollout's pool has the trainer's devices, {_RO}.nnodes=0"
        elif key == "trainer.ranks_per_device" and config.trainer.device == "cpu":
            yield f"{key} has no effect: the ranks of a CPU share its cores"
        elif key.startswith("distillation.") and not config.distillation.enabled and tree.get(config, key):
            yield f"{key} has no effect: distillation.enabled=False"
        elif not learns_from_rewards(config) and (
            key == f"{_D}.distillation_loss_coef" or (key in OF_REWARDS and tree.get(config, key))
        ):
            yield f"{key} has no effect: the distillation loss is all, {_D}.use_task_rewards=False"


def set_by_user(origin: str) -> bool:
    return origin in (LINE, PROGRAM) or origin.endswith((".yaml", ".yml"))
