"""Rules on reward models, judges and reward functions."""

from __future__ import annotations

from typing import Any

from paddock.config.rewards import reward_parts
from paddock.config.schema import Config
from paddock.errors import UserError


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
