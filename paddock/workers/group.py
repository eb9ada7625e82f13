"""Groups of processes that do the same with different rows, and the roles as the trainer sees them.

A group has two verbs: `broadcast` a call to every process, and `map` a call over shares of some work. `LocalGroup` is
one crew in this process, `RayGroup` (ray.py) many, on devices of their own. Handles cut a batch by tokens, send ranks
their rows, and put answers together by row id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paddock.config.roles import ActorConfig, CriticConfig, RefConfig
from paddock.config.schema import Config
from paddock.config.topology import model_parallel_size, pipeline_stages
from paddock.core.balance import balanced_order
from paddock.core.batch import Batch, PerToken
from paddock.engines.rollout.base import Completion, OnDone, Prompt, Sampling
from paddock.engines.train.base import EXPERT_COLUMNS, Outputs, Want
from paddock.models.packing import sequence_lengths
from paddock.workers.crew import Crew
from paddock.workers.reward_model import ModelScores
from paddock.workers.worker import Metrics, Mini, UpdatePlan, actor_plan, critic_plan, places

FORWARD = frozenset({"row", "group", "prompts", "prompt_mask", "responses", "mask", "lengths"})
UPDATE = FORWARD | {
    "rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "weights", "advantages", "returns"
}  # fmt: skip
"""Columns that a forward and an update read."""


SCORED = ("messages", "ground_truth", "place")
"""What a reward model is told of a row beside its tokens."""


class WorkerLost(Exception):
    """A process died or hangs: which one, in which phase. What the others know is of no use without it."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a batch on their way to a process."""

    batch: Batch
    positions: Tensor
    columns: frozenset[str]


class Group(Protocol):
    size: int

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """The same call in every process; answers by rank."""
        ...

    def map(
        self,
        method: str,
        shares: Sequence[Sequence[Any]],
        *args: Any,
        arrived: Callable[[Any], None] | None = None,
        stages: int = 1,
    ) -> list[Any]:
        """A call for each share, with its items before the other arguments; answers by share.

        Where shares are fewer than processes, neighbours have the same one: they work on it together. With `stages` of
        a pipeline, the processes of each stage share them so among themselves. `arrived` hears of each answer when it
        comes.
        """
        ...

    def close(self) -> None: ...


class LocalGroup:
    """One crew, in this process: rows stay where they are."""

    size = 1

    def __init__(self, crew: Crew):
        self.crew = crew

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.crew, method)(*args)]

    def map(
        self,
        method: str,
        shares: Sequence[Sequence[Any]],
        *args: Any,
        arrived: Callable[[Any], None] | None = None,
        stages: int = 1,
    ) -> list[Any]:
        (share,) = shares
        items = [item.batch if isinstance(item, Rows) else item for item in share]
        answer = getattr(self.crew, method)(*items, *args)
        if arrived:
            arrived(answer)
        return [answer]

    def close(self) -> None:
        """Nothing outlives the process."""


class Handle(ABC):
    """A role that a group plays."""

    def __init__(self, group: Group, role: str, config: Config):
        self.group, self.role, self.config = group, role, config
        self.balance = config.trainer.balance_batch

    @property
    def shares(self) -> int:
        """Parts that rows are cut into."""
        return self.group.size // self.ranks_per_row()

    def ranks_per_row(self) -> int:
        return model_parallel_size(self.keys())

    @abstractmethod
    def keys(self) -> ActorConfig | RefConfig | CriticConfig:
        """Of the role."""

    @abstractmethod
    def mini_rows(self) -> int:
        """Of an optimizer step."""

    @contextmanager
    def present(self) -> Iterator[None]:
        """On its devices for the time of the block, where the role's offload keys let it leave in between."""
        self.group.broadcast("move", self.role, "device")
        try:
            yield
        finally:
            self.group.broadcast("move", self.role, "host")

    def expect(self) -> None:
        """It is needed soon: what has left its devices comes back while they do other work."""
        self.group.broadcast("move", self.role, "coming")

    def sent(self, columns: frozenset[str]) -> frozenset[str]:
        """Choices of experts that were recorded are the actor's."""
        return columns | EXPERT_COLUMNS if self.role == "actor" else columns

    def shares_of(self, batch: Batch) -> list[list[int]]:
        """The rows of each share of a forward: cut as an update cuts them, so that they need not be sent again."""
        minis = torch.arange(len(batch)).split(self.mini_rows())
        parts = cut(sequence_lengths(batch), minis, self.shares, self.balance)
        return [torch.cat(part).sort().values.tolist() for part in parts]

    def forward(self, batch: Batch, want: Want) -> Outputs:
        shares = self.shares_of(batch)
        rows = [[Rows(batch, torch.tensor(share, dtype=torch.long), self.sent(FORWARD))] for share in shares]
        found = self.group.map("forward", rows, self.role, want, stages=pipeline_stages(self.keys()))
        if len(found) == 1:
            return Outputs(**{name: found[0][name] for name in want})
        order = places(torch.cat([part["row"] for part in found]), batch.row)
        columns: dict[str, Any] = {name: torch.cat([part[name] for part in found])[order] for name in want}
        return Outputs(**columns)

    def carry_out(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        parts = cut(sequence_lengths(batch), [mini.rows for mini in plan.minis], self.shares, self.balance)
        shares = [share_of(batch, plan, part, self.sent(UPDATE)) for part in parts]
        return self.group.map("update", shares, self.role, stages=pipeline_stages(self.keys()))[0]

    def save(self, path: Path) -> None:
        self.group.broadcast("save", self.role, path)

    def load(self, path: Path) -> None:
        self.group.broadcast("load", self.role, path)


class PolicyHandle(Handle):
    """The actor, or a frozen reference."""

    def keys(self) -> ActorConfig | RefConfig:
        roles = self.config.actor_rollout_ref
        return roles.ref if self.role == "reference" else roles.actor

    def mini_rows(self) -> int:
        return self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n

    def log_probs(self, batch: Batch) -> PerToken:
        found = self.forward(batch, frozenset({"log_probs"})).log_probs
        assert found is not None
        return found

    def update(self, batch: Batch, step: int) -> Metrics:
        return self.carry_out(batch, actor_plan(self.config, batch, step))


class CriticHandle(Handle):
    """The value model."""

    def keys(self) -> CriticConfig:
        return self.config.critic

    def mini_rows(self) -> int:
        return self.config.critic.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n

    def values(self, batch: Batch) -> PerToken:
        found = self.forward(batch, frozenset({"values"})).values
        assert found is not None
        return found

    def update(self, batch: Batch, step: int) -> Metrics:
        return self.carry_out(batch, critic_plan(self.config, batch, step))


class RolloutHandle:
    """A `RolloutEngine` of many processes: each engine, of one or `engine_size` of them, answers its share."""

    def __init__(self, group: Group, engine_size: int = 1):
        self.group, self.engines = group, group.size // engine_size

    def generate(self, prompts: list[Prompt], sampling: Sampling, on_done: OnDone | None = None) -> list[Completion]:
        """`on_done` hears of a process's responses when it has all of them."""
        work = [len(prompt.tokens) + len(prompt.rows) * sampling.max_tokens for prompt in prompts]
        parts = balanced_order(work, self.engines)
        found = self.group.map("generate", [[[prompts[i] for i in part]] for part in parts], sampling, arrived=on_done)
        by_row = {completion.row: completion for part in found for completion in part}
        return [by_row[row] for prompt in prompts for row in prompt.rows]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """They are the actor's, and come from its processes."""
        self.sync()

    def sync(self) -> Metrics:
        """The actor's weights are where the engines are: they take them there. The worst of them counts."""
        found = self.group.broadcast("sync_weights")
        return {name: max(metrics[name] for metrics in found) for name in found[0]}

    def sleep(self) -> None:
        self.group.broadcast("sleep")

    def wake(self) -> None:
        self.group.broadcast("wake")


class RewardHandle:
    """A `ModelScorer` of many processes: each has the whole model, and scores its share of the rows."""

    def __init__(self, group: Group, config: Config, tokenizer: Any, stops: frozenset[int]):
        self.group, self.cheap = group, config.reward_model.judge.source is None
        group.broadcast("open_scorer", tokenizer, stops)

    def check(self, prompt: Any, truth: Any) -> None:
        self.group.broadcast("check_scorer", prompt, truth)

    def scores(self, batch: Batch, texts: Sequence[str]) -> ModelScores:
        parts = [
            torch.tensor(part, dtype=torch.long) for part in balanced_order(sequence_lengths(batch), self.group.size)
        ]
        read = {name: column for name, column in batch.columns().items() if name in FORWARD}
        asked = Batch(**read, extras={name: values for name, values in batch.extras.items() if name in SCORED})
        shares = [[asked.rows(part), [texts[place] for place in part.tolist()]] for part in parts]
        found = self.group.map("score", shares)
        order = places(torch.cat([part["row"] for part in found]), batch.row)
        metrics = Counter[str]()
        for part in found:
            metrics.update(part["metrics"])
        tokens = [part["tokens"] for part in found if part["tokens"] is not None]
        return ModelScores(
            torch.cat([part["rows"] for part in found])[order],
            torch.cat(tokens)[order] if tokens else None,
            dict(metrics),
        )


def cut(lengths: list[int], minis: Sequence[Tensor], shares: int, balance: bool) -> list[list[Tensor]]:
    """Of each mini-batch, given by positions, each share's part: of like work, or neighbours."""
    if shares == 1:
        return [list(minis)]
    parts: list[list[Tensor]] = [[] for _ in range(shares)]
    for mini in minis:
        if balance:
            split = balanced_order([lengths[position] for position in mini.tolist()], shares)
            pieces = [mini[torch.tensor(part, dtype=torch.long)] for part in split]
        else:
            pieces = list(mini.tensor_split(shares))
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return parts


def share_of(
    batch: Batch, plan: UpdatePlan, part: list[Tensor], columns: frozenset[str] = UPDATE
) -> tuple[Rows, UpdatePlan]:
    """The rows that a share ever needs, once each, and the plan in terms of them."""
    needed = torch.cat(part).unique()
    minis = [
        Mini(torch.searchsorted(needed, rows), mini.denominators) for mini, rows in zip(plan.minis, part, strict=True)
    ]
    return Rows(batch, needed, columns), replace(plan, minis=minis)
