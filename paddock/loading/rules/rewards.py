"""Rules on reward models, judges and reward functions."""

from __future__ import annotations

from collections.abc import Iterator

from paddock.config import tree
from paddock.config.rewards import PYTHON, reward_parts
from paddock.config.schema import Config
from paddock.config.topology import splits_models
from paddock.loading.rules.devices import no_float16
from paddock.loading.rules.form import Breach, Scope, rule


@rule
def reward_model_is_named(config: Config) -> Iterator[Breach]:
    reward, judge = config.reward_model, config.reward_model.judge
    if not reward.enable and judge.source is not None:
        yield "reward_model.judge.source", "only an enabled reward model can judge", "reward_model.enable=True"
    if reward.enable and judge.source != "endpoint" and not reward.model.path:
        yield "reward_model.enable", "has no model", "reward_model.model.path=..."
    if reward.enable and judge.source == "endpoint":
        for key in ("reward_model.judge.url", "reward_model.judge.model"):
            if not tree.get(config, key):
                yield key, "reward_model.judge.source=endpoint needs it", f"{key}=..."
        if not str(judge.url).startswith(("http://", "https://")):
            yield "reward_model.judge.url", "is not an address", "http://host:port/v1"


@rule
def reward_settings_agree(config: Config) -> Iterator[Breach]:
    """Refuses reward settings that would have no effect."""
    reward, judge = config.reward_model, config.reward_model.judge
    served = judge.source == "endpoint"
    clashes = (
        (served and bool(reward.model.path), "model.path",
         "the judge is the server at reward_model.judge.url", "leave it out, or reward_model.judge.source=engine"),
        (not served and bool(judge.url), "judge.url",
         "no server is asked", "reward_model.judge.source=endpoint, or leave it out"),
        (judge.source is not None and reward.token_level, "token_level",
         "a judge gives one score for a response", "leave it out"),
        (reward.model_weight is None and reward.rule_weight is not None, "rule_weight",
         "the model's weight is not set", "reward_model.model_weight=1"),
    )  # fmt: skip
    for broken, name, reason, fix in clashes if reward.enable else ():
        if broken:
            yield f"reward_model.{name}", reason, fix


@rule
def arguments_have_their_functions(config: Config) -> Iterator[Breach]:
    if reward_parts(config) and config.reward_model.compute_score_kwargs:
        whose, fix = ("your own function", "custom_reward_function.reward_kwargs")
        if config.reward is not None:
            whose, fix = "`reward`", "reward_kwargs"
        reason = f"its arguments are for rules that data_source picks, and {whose} scores every row"
        yield "reward_model.compute_score_kwargs", reason, fix
    if config.reward_kwargs and config.reward is None:
        fix = "reward=regex, or reward_model.compute_score_kwargs for the rules that data_source picks"
        yield "reward_kwargs", "its arguments are for the rules of `reward`, and none is named", fix


@rule
def limited_calls_are_a_functions(config: Config) -> Iterator[Breach]:
    """Only calls of the user's own functions are limited; built-in rules run in processes of this machine."""
    key = "reward_model.reward_manager"
    if config.reward_model.reward_manager != "rate_limited":
        return
    functions = [part for part in reward_parts(config) if part.path]
    if not functions:
        fix = f"custom_reward_function.path=my_reward.py, or {key}=naive"
        yield key, "limits the calls of a function of your own, and none is named", fix
    for own in functions:
        if own.path == PYTHON:
            reason = f"limits calls in processes; {own.function} is a function of this program, which runs in a thread"
            yield key, reason, f"put the function into a module that can be imported; or {key}=naive"


@rule(Scope.SCORING)
def reward_model_has_devices_and_an_engine(config: Config) -> Iterator[Breach]:
    reward = config.reward_model
    if not reward.enable or reward.judge.source == "endpoint":
        return
    if reward.enable_resource_pool and reward.nnodes == 0:
        yield "reward_model.nnodes", "its pool has no node", "reward_model.nnodes=1"
    if splits_models(reward):
        yield "reward_model.strategy", "is not built yet", "reward_model.strategy=fsdp, on one device"
    if reward.judge.source is None:
        yield from no_float16(config, "reward_model.model.fsdp_config.dtype")


@rule(Scope.SCORING)
def judge_runs_in_this_process(config: Config) -> Iterator[Breach]:
    """A judge of the run's own is loaded beside the other roles, and generates by their engines."""
    reward, section = config.reward_model, "reward_model.rollout"
    if not reward.enable or reward.judge.source != "engine":
        return
    elsewhere = "serve the judge and use reward_model.judge.source=endpoint"
    for key in (f"{section}.{name}_parallel_size" for name in ("tensor_model", "data", "expert")):
        if tree.get(config, key) != 1:
            yield key, "the judge shares the one device of a run", f"leave it at 1, or {elsewhere}"
    if reward.rollout.name not in ("embedded", "hf"):
        fix = f"{section}.name=embedded, or {elsewhere}"
        yield f"{section}.name", "does not serve a judge in this process", fix
