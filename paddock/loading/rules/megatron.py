"""Rules on Megatron's engine: what it shares with other roles, and what it does not do."""

from __future__ import annotations

from collections.abc import Iterator

from paddock.config.schema import Config
from paddock.config.topology import engine_roles
from paddock.loading.rules.form import Breach, Scope, rule

_A = "actor_rollout_ref.actor"
_M = "actor_rollout_ref.model"


@rule
def megatron_trains_all_or_none(config: Config) -> Iterator[Breach]:
    """Roles of one process share Megatron's process groups, or know nothing of them."""
    actor = config.actor_rollout_ref.actor.strategy
    for role in engine_roles(config):
        if (role.keys(config).strategy == "megatron") != (actor == "megatron"):
            key = f"{role.section}.strategy"
            yield key, f"the actor's engine is {actor}, and Megatron trains all roles or none", f"{key}={actor}"


@rule(Scope.TRAINING)
def megatron_beside_other_keys(config: Config) -> Iterator[Breach]:
    """Refuses what the other engines do and Megatron's does not."""
    group = config.actor_rollout_ref
    replays, balance = group.actor.router_replay.mode, group.model.override_config.get("router_aux_loss_coef")
    asked = (
        (group.numerics == "exact", "actor_rollout_ref.numerics", "its kernels are not those of the rollout", "fast"),
        (replays != "disabled", f"{_A}.router_replay.mode", "Megatron's routers choose by themselves", "disabled"),
        (bool(balance), f"{_M}.override_config.router_aux_loss_coef", "routers are not balanced", "0"),
        (group.actor.use_prefix_grouper, f"{_A}.use_prefix_grouper",
         "a prompt is computed once for each of its responses", "False"),
    )  # fmt: skip
    for wanted, key, why, fix in asked if group.actor.strategy == "megatron" else ():
        if wanted:
            yield key, f"{why} under actor.strategy=megatron", f"{key}={fix}, or another engine"


@rule(Scope.ALONE)
def megatron_does_not_supervise(config: Config) -> Iterator[Breach]:
    """Refuses Megatron in commands beside `train`."""
    if config.actor_rollout_ref.actor.strategy == "megatron":
        key = f"{_A}.strategy"
        reason = "trains by reinforcement learning alone: supervised training and answering run FSDP or one process"
        yield key, reason, f"{key}=fsdp, or leave it out"
