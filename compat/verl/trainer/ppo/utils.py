"""Roles, and which of them a config needs."""

from __future__ import annotations

from enum import Enum
from typing import Any

from paddock.algorithms.advantages import ESTIMATOR
from verl.trainer.ppo._view import View


class Role(Enum):
    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6
    Env = 7
    TeacherModel = 8

    def __str__(self) -> str:
        return ROLE_NAMES[self]

    @classmethod
    def from_string(cls, name: str) -> Role:
        for role, known in ROLE_NAMES.items():
            if known == name.lower():
                return role
        raise ValueError(f"there is no role named {name!r}: {', '.join(ROLE_NAMES.values())} are known")


ROLE_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.Env: "env",
    Role.TeacherModel: "teacher",
}


def need_critic(config: Any) -> bool:
    """What `critic.enable` says; unset, whether the advantage estimator reads values."""
    view = View(config)
    enabled = view.critic.enable
    if enabled is not None:
        return bool(enabled)
    return "critic" in ESTIMATOR.get(view.algorithm.adv_estimator).needs


def need_reference_policy(config: Any) -> bool:
    view = View(config)
    return bool(view.algorithm.use_kl_in_reward or view.actor_rollout_ref.actor.use_kl_loss)


def need_reward_model(config: Any) -> bool:
    """`reward_model.enable`, or `reward.reward_model.enable` where the config has that section."""
    view = View(config)
    section = view.reward if "reward" in view else view
    return bool(section.reward_model.enable)
