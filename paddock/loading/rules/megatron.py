"""Rules on Megatron's engine: what it shares with other roles, and what it does not do."""

from __future__ import annotations

from typing import Any

from paddock.config.schema import Config
from paddock.config.topology import engine_roles
from paddock.errors import UserError
from paddock.loading.rules.form import Scope, rule

_A = "actor_rollout_ref.actor"
_M = "actor_rollout_ref.model"


@rule
def megatron_trains_all_or_none(config: Config) -> None:
    """Roles of one process share Megatron's process groups, or know nothing of them."""
    actor = config.actor_rollout_ref.actor.strategy
    for role in engine_roles(config):
        strategy = role.keys(config).strategy
        if (strategy == "megatron") != (actor == "megatron"):
            raise UserError(
                f"the actor's engine is {actor}, and Megatron trains all roles or none",
                key=f"{role.section}.strategy",
                value=strategy,
                fix=f"{role.section}.strategy={actor}",
            )


@rule(Scope.TRAINING)
def megatron_beside_other_keys(config: Config) -> None:
    """Refuses what the other engines do and Megatron's does not."""
    group = config.actor_rollout_ref
    if group.actor.strategy != "megatron":
        return
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


@rule(Scope.ALONE)
def megatron_does_not_supervise(config: Config) -> None:
    """Refuses Megatron in commands beside `train`."""
    if config.actor_rollout_ref.actor.strategy == "megatron":
        reason = "trains by reinforcement learning alone: supervised training and answering run FSDP or one process"
        raise UserError(reason, key=f"{_A}.strategy", value="megatron", fix=f"{_A}.strategy=fsdp, or leave it out")
