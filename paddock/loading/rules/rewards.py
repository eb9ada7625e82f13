"""Rules on reward models, judges and reward functions."""

from __future__ import annotations

from typing import Any

from paddock.config.rewards import PYTHON, reward_parts
from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.loading.rules.devices import no_float16
from paddock.loading.rules.form import Scope, rule


@rule
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


@rule
def reward_settings_agree(config: Config) -> None:
    """Refuses reward settings that would have no effect."""
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


@rule
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


@rule
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


@rule(Scope.SCORING)
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


@rule(Scope.SCORING)
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
    if limits.name not in ("embedded", "hf"):
        key = "reward_model.rollout.name"
        reason = "does not serve a judge in this process"
        raise UserError(reason, key=key, value=limits.name, fix=f"{key}=embedded, or {elsewhere}")
