"""Roles whose work is spread over many processes: each cuts a batch, sends ranks their rows, and joins the answers.

A sharded role has the methods of the role in one process (policy.py, rollout.py, reward_model.py) and is
used in its place. `Ranks` is the pool of processes: Ray's in ray.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from paddock.config.roles import ActorConfig, CriticConfig, RefConfig
from paddock.config.topology import DevicePool, model_parallel_size, pipeline_stages
from paddock.core.balance import balanced_order
from paddock.core.batch import Batch, PerToken
from paddock.engines.train.base import EXPERT_COLUMNS, Outputs, Residency, Want
from paddock.models.packing import sequence_lengths
from paddock.workers.policy import Critic, Policy
from paddock.workers.rank import Rank
from paddock.workers.reward_model import ModelScorer, ModelScores
from paddock.workers.role import MovingWeights, TrainedRole
from paddock.workers.rollout import EpisodeShare
from paddock.workers.supervised import Learner
from paddock.workers.updates import Metrics, Mini, UpdatePlan

FORWARD = frozenset({"row", "group", "prompts", "prompt_mask", "responses", "mask", "lengths"})
UPDATE = FORWARD | {
    "versions", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "weights", "advantages", "returns",
    "teacher_log_probs", "teacher_tokens", "teacher_topk_log_probs"
}  # fmt: skip
"""Columns that ranks are sent for a forward and an update."""
SCORED = ("messages", "ground_truth", "location", "conversation")
"""What a reward model is told about a row beside its tokens."""

Parts = Sequence[Sequence[EpisodeShare]]
R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class WorkerLost(Exception):
    """A process died or hangs: which one, in which phase. What the others know is of no use without it."""


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Some rows of a batch on their way to a process."""

    batch: Batch
    positions: Tensor
    columns: frozenset[str]


class Pending(Protocol[T_co]):
    """A call that processes are still answering. Calls of a pool are answered in the order in which they were begun."""

    def ready(self) -> bool:
        """Returns True if every process has answered."""
        ...

    def wait(self, arrived: Callable[[Any], None] | None = None) -> Sequence[T_co]:
        """Returns the answers by share, once all are there; `arrived` hears of each one when it comes."""
        ...


class Ranks(Protocol):
    """The processes of one pool. A call names the role (an attribute of `Rank`; "" for the rank itself) and gives the
    method as a function of its class, so that readers and type checkers can follow it."""

    pool: DevicePool
    size: int

    def broadcast(
        self, role: str, method: Callable[Concatenate[R, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Makes the same call in every process; returns the answers by rank."""
        ...

    def begin(
        self, role: str, method: Callable[..., T], shares: Sequence[Sequence[Any]], *args: Any, stages: int = 1
    ) -> Pending[T]:
        """Begins a call for each share, with its items before the other arguments, behind the calls begun before.

        If shares are fewer than processes, neighbours get the same one: they work on it together. With `stages` of a
        pipeline, the processes of each stage share them so among themselves.
        """
        ...

    def map(
        self,
        role: str,
        method: Callable[..., T],
        shares: Sequence[Sequence[Any]],
        *args: Any,
        arrived: Callable[[T], None] | None = None,
        stages: int = 1,
    ) -> list[T]:
        """Begins a call as `begin` does and waits for its answers."""
        return list(self.begin(role, method, shares, *args, stages=stages).wait(arrived))

    def count(self, name: str) -> None:
        """Raises a counter in the store that the processes read."""
        ...

    def close(self) -> None: ...


class ShardedRole(MovingWeights):
    """A role with a model that many ranks train or run together."""

    kind: type[TrainedRole]
    """The class whose methods the ranks run."""

    def __init__(
        self, ranks: Ranks, name: str, keys: ActorConfig | RefConfig | CriticConfig, mini_rows: int, balance: bool
    ):
        """`mini_rows`: rows of an optimizer step. `balance`: give every rank the same amount of work."""
        self.ranks, self.name, self.mini_rows, self.balance = ranks, name, mini_rows, balance
        self.version = 0
        self.shares = ranks.size // model_parallel_size(keys)
        """Number of parts that rows are cut into."""
        self.stages = pipeline_stages(keys)

    @property
    def devices(self) -> int:
        return self.ranks.size

    def device_name(self) -> str:
        return self.ranks.broadcast(self.name, self.kind.device_name)[0]

    def move(self, where: Residency) -> None:
        self.ranks.broadcast(self.name, self.kind.move, where)

    def sent(self, columns: frozenset[str]) -> frozenset[str]:
        """Adds the recorded choices of experts for the actor, whose they are."""
        return columns | EXPERT_COLUMNS if self.name == "actor" else columns

    def shares_of(self, batch: Batch) -> list[list[int]]:
        """Returns the rows of each share of a forward: cut as an update cuts them, so that they are sent once."""
        minis = torch.arange(len(batch)).split(self.mini_rows)
        parts = cut(sequence_lengths(batch), minis, self.shares, self.balance, self.kind.rows_together)
        return [torch.cat(part).sort().values.tolist() for part in parts]

    def forward(self, batch: Batch, want: Want) -> Outputs:
        shares = [torch.tensor(share, dtype=torch.long) for share in self.shares_of(batch)]
        rows = [[SharedRows(batch, share, self.sent(FORWARD))] for share in shares]
        answers = self.ranks.map(self.name, self.kind.forward, rows, want, stages=self.stages)
        order = torch.cat(shares).argsort()
        columns: dict[str, Any] = {
            name: torch.cat([getattr(answer, name) for answer in answers])[order] for name in want
        }
        return Outputs(**columns)

    def learn(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        lengths, minis = sequence_lengths(batch), [mini.rows for mini in plan.minis]
        parts = cut(lengths, minis, self.shares, self.balance, self.kind.rows_together)
        shares = [share_of(batch, plan, part, self.sent(UPDATE)) for part in parts]
        self.version += 1
        return self.ranks.map(self.name, self.kind.learn, shares, stages=self.stages)[0]

    def save(self, path: Path) -> None:
        self.ranks.broadcast(self.name, self.kind.save, path)

    def load(self, path: Path, version: int | None = None) -> None:
        self.ranks.broadcast(self.name, self.kind.load, path, version)
        self.version = self.version + 1 if version is None else version


class ShardedPolicy(ShardedRole):
    """The actor, the reference or a teacher on many ranks: see `Policy`."""

    kind = Policy

    def log_probs(self, batch: Batch) -> PerToken:
        return self.forward(batch, frozenset({"log_probs"})).need("log_probs")


class ShardedCritic(ShardedRole):
    """The critic on many ranks: see `Critic`."""

    kind = Critic

    def values(self, batch: Batch) -> PerToken:
        return self.forward(batch, frozenset({"values"})).need("values")


class ShardedLearner(ShardedRole):
    """A learner of given answers on many ranks: see `Learner`."""

    def __init__(self, ranks: Ranks, keys: ActorConfig, mini_rows: int, balance: bool, kind: type[Learner]):
        super().__init__(ranks, "learner", keys, mini_rows, balance)
        self.kind = self.learner = kind

    def export(self, folder: Path) -> None:
        self.ranks.broadcast(self.name, self.learner.export, folder)

    def unread(self) -> int | None:
        return self.ranks.broadcast(self.name, self.learner.unread)[0]


class ShardedScorer:
    """A reward model of many processes: each has the whole model, and scores its share of the rows."""

    def __init__(self, ranks: Ranks, cheap: bool, tokenizer: Any, stops: frozenset[int]):
        self.ranks, self.cheap = ranks, cheap
        ranks.broadcast("", Rank.open_scorer, tokenizer, stops)

    def check(self, prompt: Any, truth: Any) -> None:
        self.ranks.broadcast("scorer", ModelScorer.check, prompt, truth)

    def scores(self, batch: Batch, texts: Sequence[str]) -> ModelScores:
        cuts = balanced_order(sequence_lengths(batch), self.ranks.size)
        parts = [torch.tensor(part, dtype=torch.long) for part in cuts]
        read = {name: column for name, column in batch.columns().items() if name in FORWARD}
        asked = Batch(**read, extras={name: values for name, values in batch.extras.items() if name in SCORED})
        shares = [[asked.rows(part), [texts[index] for index in part.tolist()]] for part in parts]
        answers = self.ranks.map("", Rank.score, shares)
        order = torch.cat(parts).argsort()
        metrics = Counter[str]()
        for answer in answers:
            metrics.update(answer.metrics)
        tokens = [answer.tokens for answer in answers if answer.tokens is not None]
        return ModelScores(
            torch.cat([answer.rows for answer in answers])[order],
            torch.cat(tokens)[order] if tokens else None,
            dict(metrics),
        )


def cut(
    lengths: list[int], minis: Sequence[Tensor], shares: int, balance: bool, together: int = 1
) -> list[list[Tensor]]:
    """Returns each share's part of each mini-batch, given by positions: of like work, or neighbours.

    `together` neighbours of a mini-batch (the two answers of a pair) are never separated.
    """
    if shares == 1:
        return [list(minis)]
    parts: list[list[Tensor]] = [[] for _ in range(shares)]
    for mini in minis:
        units = mini.view(-1, together)
        if balance:
            work = [sum(lengths[position] for position in unit) for unit in units.tolist()]
            pieces = [units[torch.tensor(part, dtype=torch.long)] for part in balanced_order(work, shares)]
        else:
            pieces = list(units.tensor_split(shares))
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece.flatten())
    return parts


def share_of(
    batch: Batch, plan: UpdatePlan, part: list[Tensor], columns: frozenset[str] = UPDATE
) -> tuple[SharedRows, UpdatePlan]:
    """Returns the rows that a share ever needs, once each, and the plan in terms of them."""
    needed = torch.cat(part).unique()
    minis = [
        Mini(torch.searchsorted(needed, rows), mini.denominators) for mini, rows in zip(plan.minis, part, strict=True)
    ]
    return SharedRows(batch, needed, columns), replace(plan, minis=minis)
