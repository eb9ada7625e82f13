"""Rewards under verl's names: the user's function and manager by config, and one call of it for a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paddock.errors import UserError
from paddock.rewards.functions import Target, load
from paddock.rewards.score import Failed, ScoreRequest
from verl.trainer.ppo._view import read
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import extract_reward, get_reward_manager_cls


@dataclass(frozen=True)
class CustomReward:
    """The function at an address, in verl's signature; what it returns is checked to be a score."""

    target: Target

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> float | dict[str, Any]:
        function = load(replace(self.target, kwargs={**kwargs, **self.target.kwargs}))
        (score,) = function([ScoreRequest(data_source, solution_str, ground_truth, extra_info or {})])
        return {"score": score.value, **score.extras} if score.extras else score.value


def get_custom_reward_fn(config: Any) -> CustomReward | None:
    """What `custom_reward_function` names, there or in section `reward`; None where no path is set."""
    node = first(config, "reward.custom_reward_function.path", "custom_reward_function.path", parent=True)
    if node is None:
        return None
    kwargs = dict(read(node, "reward_kwargs", None) or {})
    target = Target(read(node, "path", ""), read(node, "name", None) or "compute_score", kwargs)
    try:
        load(replace(target, batch=manager_name(config) == "batch"))
    except Failed as error:
        raise UserError(
            f"{target.name} {error}",
            key="custom_reward_function.path",
            value=target.path,
            fix="name a file with def compute_score(data_source, solution_str, ground_truth, extra_info)",
        ) from error
    return CustomReward(target)


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any) -> Any:
    """A manager by the name in the config, built in or registered: `manager(data, return_dict=True)` scores a batch."""
    source = first(config, "reward.reward_manager.source", "reward_manager.source")
    if source not in (None, "register"):
        raise UserError(
            "managers are found by the name they are registered under",
            key="reward_manager.source",
            value=source,
            fix="reward_manager.source=register, and import the module that registers it",
        )
    return get_reward_manager_cls(manager_name(config))(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=get_custom_reward_fn(config) or default_compute_score,
        reward_fn_key=first(config, "data.reward_fn_key") or "data_source",
        **reward_kwargs,
    )


def manager_name(config: Any) -> str:
    names = ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
    return first(config, *names) or "naive"


def compute_reward(data: Any, reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, Any]]:
    """Scores [B, R], and what else the function returned. It is called once: what it raises, the caller sees."""
    parameters = inspect.signature(reward_fn).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_all and "return_dict" not in parameters:
        return reward_fn(data), {}
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})


def compute_reward_async(*args: Any, **kwargs: Any) -> Any:
    """Refused: there is no Ray task to wait for."""
    raise UserError(
        "compute_reward_async is a Ray task, and scoring does not use Ray here",
        fix="call compute_reward(data, reward_fn); in a run, scorers work in processes of their own anyway",
    )


compute_reward_async.remote = compute_reward_async  # type: ignore[attr-defined]


def first(config: Any, *paths: str, parent: bool = False) -> Any:
    """The value at the first of these paths that is set, or the section it is in."""
    for path in paths:
        section, value = None, config
        for name in path.split("."):
            section, value = value, read(value, name, None)
        if value is not None:
            return section if parent else value
    return None


__all__ = [
    "compute_reward",
    "compute_reward_async",
    "extract_reward",
    "get_custom_reward_fn",
    "load_reward_manager",
]
