"""The roles of a run, by its config: actor and rollout always, reference, critic and teachers if they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paddock.config.distillation import teachers_of
from paddock.config.schema import Config
from paddock.config.topology import (
    PAIRS,
    device_count,
    engine_size,
    in_one_process,
    pools,
    roles_of,
    rolls_out_apart,
    rolls_out_beside,
    supervised_pools,
)
from paddock.core.timing import Timer
from paddock.engines.train.open import backend_of
from paddock.workers.policy import Critic, Policy
from paddock.workers.rank import Rank
from paddock.workers.role import with_end_of_text
from paddock.workers.rollout import Rollout
from paddock.workers.sharded import Ranks, ShardedCritic, ShardedLearner, ShardedPolicy
from paddock.workers.sharded_rollout import RolloutServers, ShardedRollout
from paddock.workers.supervised import AnswerLearner, Learner, PairLearner
from paddock.workers.teachers import Teachers


@dataclass(frozen=True)
class Roles:
    """In one process each role is the object that works; over many ranks it is a proxy with the same methods."""

    actor: Policy | ShardedPolicy
    rollout: Rollout | ShardedRollout
    frozen: Mapping[str, Policy | ShardedPolicy]
    """Policies that are not trained, by name."""
    critic: Critic | ShardedCritic | None
    teachers: Teachers | None
    stop_tokens: frozenset[int]
    rank: Rank | None = None
    """This process, if all roles are in it."""
    ranks: tuple[Ranks, ...] = ()
    """The pools of processes, else."""
    scoring: Ranks | None = None
    """The processes that have the reward model; None: there is none, or it is in this one."""

    @property
    def reference(self) -> Policy | ShardedPolicy | None:
        return self.frozen.get("reference")

    @contextmanager
    def generating(self, time: Timer) -> Iterator[None]:
        """Runs the rollouts of a step; leaving it prefetches the reference, while rewards are scored."""
        with self.rollout.awake(time):
            yield
        if self.reference:
            self.reference.prefetch()

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Runs the forward passes of a step; leaving it prefetches the actor, unless the critic is updated first."""
        yield
        if not self.critic:
            self.actor.prefetch()

    @property
    def devices(self) -> int:
        return 1 if self.rank else device_count(ranks.pool for ranks in self.ranks)

    def memory(self) -> tuple[int, int] | None:
        """Returns the most bytes that one device held, in tensors and in all; None on a CPU. Peaks of processes that
        share a device add up, as if all were there at once."""
        if self.rank:
            return self.rank.memory()
        used: Counter[tuple[str, int]] = Counter()
        held: Counter[tuple[str, int]] = Counter()
        for ranks in self.ranks:
            for number, peaks in enumerate(ranks.broadcast("", Rank.memory)):
                if peaks is not None:
                    used[ranks.pool.place, number] += peaks[0]
                    held[ranks.pool.place, number] += peaks[1]
        return (max(used.values()), max(held.values())) if used else None

    def close(self) -> None:
        for ranks in self.ranks:
            ranks.close()


def build(config: Config, tokenizer: Any, total_steps: int) -> Roles:
    """Makes every role in this process if one device is enough, else in processes of Ray's, one per device."""
    if in_one_process(config):
        return local_roles(Rank(config, total_steps, pools(config)[0].roles, backend_of(config, alone=True)), tokenizer)
    from paddock.workers.ray import start_ranks

    return sharded_roles(config, tokenizer, start_ranks(config, total_steps, pools(config)))


def build_learner(config: Config, role: str, total_steps: int) -> tuple[Learner | ShardedLearner, Callable[[], None]]:
    """Makes the one role of a supervised run, here or over ranks; returns it and what ends its processes."""
    wanted = supervised_pools(config, role)
    if wanted[0].size == 1:
        learner = Rank(config, total_steps, (role,)).learner
        assert learner is not None
        return learner, lambda: None
    from paddock.workers.ray import start_ranks

    ranks = start_ranks(config, total_steps, wanted)["main"]
    kind = PairLearner if role == PAIRS else AnswerLearner
    rows, balance = config.data.train_batch_size * kind.rows_together, config.trainer.balance_batch
    return ShardedLearner(ranks, config.actor_rollout_ref.actor, rows, balance, kind), ranks.close


def local_roles(rank: Rank, tokenizer: Any) -> Roles:
    assert rank.actor is not None and rank.rollout is not None
    ends = with_end_of_text(rank.end_tokens(), tokenizer)
    return Roles(
        rank.actor, rank.rollout, rank.frozen, rank.critic, teachers_among(rank.frozen, rank.config), ends, rank
    )


def sharded_roles(config: Config, tokenizer: Any, started: dict[str, Ranks]) -> Roles:
    """`started` are the pools by name."""
    ranks_of = {role: started[pool.name] for pool in pools(config) for role in pool.roles}
    group, balance = config.actor_rollout_ref, config.trainer.balance_batch
    rows = group.actor.ppo_mini_batch_size * group.rollout.n
    actor = ShardedPolicy(ranks_of["actor"], "actor", group.actor, rows, balance)
    rollout = ShardedRollout(ranks_of["rollout"], engine_size(config))
    if rolls_out_apart(config):
        name, beside = group.rollout.name or "", rolls_out_beside(config)
        rollout = RolloutServers(ranks_of["rollout"], engine_size(config), actor, name, beside)
    frozen = {
        name: ShardedPolicy(ranks_of[kind.name], name, group.ref, rows, balance)
        for kind in roles_of(config)
        if kind.frozen
        for name in kind.models(config)
    }
    critic = None
    if "critic" in ranks_of:
        critic_rows = config.critic.ppo_mini_batch_size * group.rollout.n
        critic = ShardedCritic(ranks_of["critic"], "critic", config.critic, critic_rows, balance)
    return Roles(
        actor=actor,
        rollout=rollout,
        frozen=frozen,
        critic=critic,
        teachers=teachers_among(frozen, config),
        stop_tokens=with_end_of_text(actor.ranks.broadcast("", Rank.end_tokens)[0], tokenizer),
        ranks=tuple(started.values()),
        scoring=ranks_of.get("reward_model"),
    )


def teachers_among(frozen: Mapping[str, Policy | ShardedPolicy], config: Config) -> Teachers | None:
    named = {one.role: frozen[one.role] for one in teachers_of(config.distillation)}
    return Teachers(config.distillation, config.data.reward_fn_key, named) if named else None
