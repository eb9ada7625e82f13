"""Rules on engines that generate, on sampling and on conversations."""

from __future__ import annotations

from paddock.config import tree
from paddock.config.conversations import converses, environments_named, paths_of
from paddock.config.rewards import PYTHON
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import engine_size, estimator_needs, in_one_process, rolls_out_apart
from paddock.errors import UserError, together
from paddock.loading.rules.form import Scope, rule

_A = "actor_rollout_ref.actor"
_RO = "actor_rollout_ref.rollout"
NOT_FOR_COPIES = (
    f"{_RO}.enable_rollout_routing_replay",
    f"{_RO}.data_parallel_size",
    f"{_RO}.checkpoint_engine.backend",
    f"{_RO}.checkpoint_engine.engine_kwargs",
)
"""Keys that no engine with a copy of the weights honours."""


@rule(Scope.TRAINING)
def engines_honour_their_keys(config: Config) -> None:
    default, engine = Config(), config.actor_rollout_ref.rollout.name
    kind = engine_kind(engine)
    unsupported = [*NOT_FOR_COPIES] if kind.copies_weights else []
    if kind.copies_weights and not kind.splits_experts:
        unsupported.append(f"{_RO}.expert_parallel_size")
    unsupported += [] if kind.stop_strings else [f"{_RO}.stop"]
    unsupported += [] if kind.min_tokens else [f"{_RO}.min_tokens"]
    errors = [
        UserError(f"is not built yet for {engine}", key=key, value=value, fix="leave it out")
        for key in unsupported
        if (value := tree.get(config, key)) != tree.get(default, key)
    ]
    if errors:
        raise together(errors)


@rule
def sampling_is_possible(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    for key, top_k in ((f"{_RO}.top_k", rollout.top_k), (f"{_RO}.val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k < 1 and top_k != -1:
            raise UserError("is not a number of tokens", key=key, value=top_k, fix="-1 for all, or at least 1")
    for string in rollout.stop:
        if not string or string.encode(errors="replace").decode() != string or "\ufffd" in string:
            reason = "has a character that stands for bytes which are no text" if string else "has an empty text"
            raise UserError(reason, key=f"{_RO}.stop", value=rollout.stop, fix="leave it out")
    if rollout.min_tokens > rollout.response_length:
        raise UserError(
            f"is more than the longest response, {rollout.response_length} tokens",
            key=f"{_RO}.min_tokens",
            value=rollout.min_tokens,
            fix=f"data.max_response_length={rollout.min_tokens}, or a smaller {_RO}.min_tokens",
        )
    validation = rollout.val_kwargs
    if validation.do_sample and validation.temperature == 0:
        raise UserError(
            "sampling needs a temperature",
            key=f"{_RO}.val_kwargs.temperature",
            value=0,
            fix=f"{_RO}.val_kwargs.temperature=1.0",
        )


@rule
def rollouts_apart_copy_weights(config: Config) -> None:
    """A pool of its own needs an engine that takes weights from elsewhere."""
    rollout = config.actor_rollout_ref.rollout
    if rolls_out_apart(config) and not engine_kind(rollout.name).copies_weights:
        raise UserError(
            f"{_RO}.name={rollout.name} runs the actor's own weights, in the actor's processes",
            key="actor_rollout_ref.hybrid_engine",
            value=False,
            fix=f"{_RO}.name=vllm or sglang, or leave it out",
        )


@rule(Scope.TRAINING)
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


@rule(Scope.TRAINING)
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


@rule(Scope.TRAINING)
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
