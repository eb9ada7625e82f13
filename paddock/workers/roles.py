"""Who takes part in a run, by its config: actor and rollout always, reference and critic where they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paddock.config.schema import Config
from paddock.config.topology import engine_size, in_one_process, pools, rolls_out_apart
from paddock.core.timing import Timer
from paddock.engines.rollout.base import RolloutEngine
from paddock.engines.train.single import SingleEngine
from paddock.workers.crew import Crew, end_tokens, engines_of, rollout_engine
from paddock.workers.group import CriticHandle, Group, LocalGroup, PolicyHandle, RolloutHandle
from paddock.workers.servers import Servers
from paddock.workers.worker import Metrics

__all__ = ["Roles", "build", "rollout_engine", "stop_tokens"]


@dataclass(frozen=True)
class Roles:
    actor: PolicyHandle
    rollout: RolloutEngine
    reference: PolicyHandle | None
    critic: CriticHandle | None
    stop_tokens: frozenset[int]
    groups: tuple[Group, ...] = ()
    scoring: Group | None = None
    """The processes that have the reward model; None: there is none, or it is in this one."""

    @contextmanager
    def generating(self, time: Timer) -> Iterator[None]:
        """The policy's weights are where the rollout engine reads them, for the time of the block."""
        if not isinstance(self.rollout, RolloutHandle):
            with self.actor.present():
                yield
            return
        with time("gen"):
            self.rollout.wake()
        yield
        with time("gen"):
            self.rollout.sleep()  # not after an error: what is left of the group may not answer

    def expect_reference(self) -> None:
        """Its turn is near: scoring, and the actor's log-probs, hide the way of weights that are on the host."""
        if self.reference:
            self.reference.expect()

    def sync_weights(self) -> Metrics:
        """The rollout engines take the actor's new weights; one that runs the actor's own has them."""
        return self.rollout.sync() if isinstance(self.rollout, RolloutHandle) else {}

    @property
    def devices(self) -> int:
        return sum(group.size for group in self.groups)

    def memory(self) -> tuple[int, int] | None:
        """The most that one device held, in tensors and in all; None on a CPU."""
        found = [use for group in self.groups for use in group.broadcast("memory") if use is not None]
        return (max(use for use, _ in found), max(held for _, held in found)) if found else None

    def close(self) -> None:
        for group in self.groups:
            group.close()


def build(config: Config, tokenizer: Any, total_steps: int) -> Roles:
    """Every role in this process where one device is enough, else in processes of Ray's, one a device."""
    if in_one_process(config):
        engines = engines_of(config, alone=True)
        crew = Crew(config, total_steps, pools(config)[0].roles, engines)
        assert crew.rollout is not None
        group = LocalGroup(crew)
        in_place = config.actor_rollout_ref.rollout.name in ("embedded", "hf")
        shares = in_place and engines is SingleEngine  # the actor's own weights: it never sleeps
        return roles_of(config, tokenizer, {"main": group}, crew.rollout if shares else None)
    from paddock.workers.ray import start_groups

    return roles_of(config, tokenizer, start_groups(config, total_steps))


def roles_of(config: Config, tokenizer: Any, groups: dict[str, Any], rollout: RolloutEngine | None = None) -> Roles:
    """`rollout` is the engine that this process has itself."""
    group_of: dict[str, Group] = {role: groups[pool.name] for pool in pools(config) for role in pool.roles}
    ends: frozenset[int] = group_of["actor"].broadcast("end_tokens")[0]
    actor = PolicyHandle(group_of["actor"], "actor", config)
    return Roles(
        actor=actor,
        rollout=rollout or rollout_handle(config, group_of["rollout"], actor),
        reference=PolicyHandle(group_of["reference"], "reference", config) if "reference" in group_of else None,
        critic=CriticHandle(group_of["critic"], "critic", config) if "critic" in group_of else None,
        stop_tokens=with_end_of_text(ends, tokenizer),
        groups=tuple(groups.values()),
        scoring=None if in_one_process(config) else group_of.get("reward_model"),
    )


def rollout_handle(config: Config, group: Group, actor: PolicyHandle) -> RolloutHandle:
    size = engine_size(config)
    return Servers(group, size, actor) if rolls_out_apart(config) else RolloutHandle(group, size)


def stop_tokens(engine: SingleEngine, tokenizer: Any) -> frozenset[int]:
    return with_end_of_text(end_tokens(engine), tokenizer)


def with_end_of_text(ends: frozenset[int], tokenizer: Any) -> frozenset[int]:
    """Those that the model names, and the tokenizer's end of text."""
    return ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id}
