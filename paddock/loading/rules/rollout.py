"""Rules on engines that generate, on sampling and on conversations."""

from __future__ import annotations

from collections.abc import Iterator

from paddock.config import tree
from paddock.config.conversations import converses, environments_named, files_of
from paddock.config.rewards import PYTHON
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import engine_size, estimator_needs, in_one_process, rolls_out_apart
from paddock.errors import UserError, together
from paddock.loading.rules.form import Breach, Scope, rule

_A = "actor_rollout_ref.actor"
_RO = "actor_rollout_ref.rollout"


@rule(Scope.TRAINING)
def engines_honour_their_keys(config: Config) -> None:
    engine = config.actor_rollout_ref.rollout.name
    kind = engine_kind(engine)
    honoured = {
        "enable_rollout_routing_replay": not kind.copies_weights,
        "data_parallel_size": not kind.copies_weights,
        "checkpoint_engine.backend": not kind.copies_weights,
        "checkpoint_engine.engine_kwargs": not kind.copies_weights,
        "expert_parallel_size": kind.splits_experts or not kind.copies_weights,
        "stop": kind.stop_strings,
        "min_tokens": kind.min_tokens,
        "scheduling_policy": kind.priorities or not kind.copies_weights,
    }
    errors = [
        UserError(f"is not built yet for {engine}", key=key, value=value, fix="leave it out")
        for key in (f"{_RO}.{name}" for name, taken in honoured.items() if not taken)
        if (value := tree.get(config, key)) != tree.default_of(key)
    ]
    if errors:
        raise together(errors)


@rule
def sampling_is_possible(config: Config) -> Iterator[Breach]:
    rollout, validation = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.val_kwargs
    for string in rollout.stop:
        if not string or string.encode(errors="replace").decode() != string or "\ufffd" in string:
            reason = "has a character that stands for bytes which are no text" if string else "has an empty text"
            yield f"{_RO}.stop", reason, "leave it out"
    if rollout.min_tokens > rollout.response_length:
        reason = f"is more than the longest response, {rollout.response_length} tokens"
        fix = f"data.max_response_length={rollout.min_tokens}, or a smaller {_RO}.min_tokens"
        yield f"{_RO}.min_tokens", reason, fix
    if validation.do_sample and validation.temperature == 0:
        key = f"{_RO}.val_kwargs.temperature"
        yield key, "sampling needs a temperature", f"{key}=1.0"


@rule
def rollouts_apart_copy_weights(config: Config) -> Iterator[Breach]:
    """A pool of its own needs an engine that takes weights from elsewhere."""
    rollout, kind = config.actor_rollout_ref.rollout, engine_kind(config.actor_rollout_ref.rollout.name)
    if rolls_out_apart(config) and not (kind.copies_weights or kind.serves_apart):
        reason = f"{_RO}.name={rollout.name} runs the actor's own weights, in the actor's processes"
        yield "actor_rollout_ref.hybrid_engine", reason, f"{_RO}.name=embedded, vllm or sglang, or leave it out"


@rule(Scope.TRAINING)
def served_log_probs_are_those_of_the_temperature(config: Config) -> Iterator[Breach]:
    """An engine with a copy of the weights reports log-probs at one point of its sampler: training needs them after
    temperature and before top-k, top-p, min-p and min_tokens."""
    rollout = config.actor_rollout_ref.rollout
    kind = engine_kind(rollout.name)
    if not kind.copies_weights or rollout.temperature == 1.0:
        return
    filtered = rollout.do_sample and (rollout.top_k > 0 or rollout.top_p < 1.0 or rollout.min_p > 0.0)
    if (filtered or rollout.min_tokens) and not kind.unfiltered_log_probs:
        yield (
            f"{_RO}.temperature",
            f"beside top_k, top_p, min_p or min_tokens, {rollout.name} reports log-probs only of what these leave",
            f"{_RO}.temperature=1.0; or {_RO}.top_k=-1 {_RO}.top_p=1.0 {_RO}.min_p=0 {_RO}.min_tokens=0; "
            f"or {_RO}.name=embedded",
        )
    if rollout.logprobs_mode == "raw_logprobs":
        key = f"{_RO}.logprobs_mode"
        reason = f"log-probs would not be those of temperature {rollout.temperature}, at which tokens are drawn"
        yield key, reason, f"{key}=processed_logprobs"


@rule(Scope.TRAINING)
def conversations_have_what_they_need(config: Config) -> Iterator[Breach]:
    """Refuses what cannot serve several turns of the policy, where the config asks for them."""
    if not converses(config.actor_rollout_ref.rollout, config.environment):
        return
    rollout, estimator = config.actor_rollout_ref.rollout, "algorithm.adv_estimator"
    if "one_turn" in estimator_needs(config):
        reason = "its baseline of a token is over responses of one turn"
        yield estimator, reason, f"{estimator}=tir_{config.algorithm.adv_estimator}"
    if rollout.enable_rollout_routing_replay:
        reason = "the experts of tokens that an environment wrote are not recorded"
        fix = f"leave it out; {_A}.router_replay.mode=R2 replays experts of the trainer's own pass"
        yield f"{_RO}.enable_rollout_routing_replay", reason, fix
    if engine_size(config) > 1:
        key = f"{_RO}.tensor_model_parallel_size"
        reason = "conversations are driven in the process of their engine, and this one has several"
        yield key, reason, f"{key}=1: each device then has an engine of its own"
    named = {
        "environment": environments_named(config.environment).values(),
        f"{_RO}.multi_turn.function_tool_path": files_of(rollout.multi_turn.function_tool_path),
    }
    for key, paths in named.items() if not in_one_process(config) else ():
        for path in paths:
            if path.startswith(f"{PYTHON}:"):
                reason = "is of the program that runs, and other processes cannot import it"
                yield key, reason, "put it into a module or a file, and name that", path
