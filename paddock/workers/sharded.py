"""Roles whose work is spread over many processes: each cuts a batch, sends ranks their rows, and joins the answers.

A sharded role has the methods of the role in one process (policy.py, rollout.py, reward_model.py) and is
used in its place. `Ranks` is the pool of processes: Ray's in ray.py.
"""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from paddock.config.roles import ActorConfig, CriticConfig, RefConfig
from paddock.config.topology import DevicePool, model_parallel_size, pipeline_stages
from paddock.core.balance import balanced_order
from paddock.core.batch import NOBODY, Batch, PerToken
from paddock.core.timing import Timer
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Decoded, Request, Sampling, Until
from paddock.engines.train.base import EXPERT_COLUMNS, Outputs, Residency, Want
from paddock.models.packing import sequence_lengths
from paddock.rollouts.conversations import OnEpisodes
from paddock.rollouts.environments import Environments, Sampler, requests_of
from paddock.rollouts.episode import Episode
from paddock.rollouts.packed import PackedEpisodes
from paddock.workers.policy import Critic, Policy
from paddock.workers.probe import out_of_step
from paddock.workers.rank import Rank
from paddock.workers.reward_model import ModelScorer, ModelScores
from paddock.workers.role import MovingWeights, TrainedRole
from paddock.workers.rollout import EpisodeShare, Others, Rollout, RolloutServer
from paddock.workers.supervised import Learner
from paddock.workers.updates import Metrics, Mini, UpdatePlan
from paddock.workers.weight_sender import WeightSender

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


class ShardedRollout(Sampler):
    """Rollout engines beside the actor's ranks: each, of one or `engine_size` processes, answers its share."""

    def __init__(self, ranks: Ranks, engine_size: int = 1):
        self.ranks, self.engine_size = ranks, engine_size
        self.engines = ranks.size // engine_size
        self.published = NOBODY
        """Version of the actor's weights that the engines sample with; `NOBODY` before they have any."""
        self.in_environments = False
        self.counted: Decoded | None = None
        self.begun: dict[int, int] = {}
        """Engine of each conversation that has begun, by id."""
        self.calls = (f"rollout/{uuid.uuid4().hex}/{number}" for number in itertools.count())

    @property
    def version(self) -> int:
        return self.published

    @contextmanager
    def awake(self, time: Timer) -> Iterator[None]:
        """See `Rollout.awake`. After an error nobody is put to sleep: ranks that are left may not answer."""
        with time("gen"):
            self.wake()
        yield
        with time("gen"):
            self.sleep()

    def wake(self) -> None:
        self.published = self.ranks.broadcast("rollout", Rollout.wake)[0]

    def sleep(self) -> None:
        counts = [count for count in self.ranks.broadcast("rollout", Rollout.sleep) if count is not None]
        if counts:  # engines decode side by side
            steps, rows = max(count.steps for count in counts), sum(count.rows for count in counts)
            self.counted = Decoded(steps, rows, sum(count.recomputed for count in counts))

    @property
    def decoded(self) -> Decoded | None:
        return self.counted

    def open_environments(self, environments: Environments) -> None:
        """Opens environments in every process: what a program holds cannot travel there."""
        setting, self.in_environments = environments.setting, True
        self.ranks.broadcast("", Rank.open_environments, setting.tokenizer, setting.stops)

    def go_on(
        self,
        asked: list[Episode],
        sampling: Sampling,
        on_done: OnEpisodes | None = None,
        until: Until | None = None,
    ) -> list[Episode]:
        """`on_done` hears of a process's episodes when it has all of them. Episodes are cut by the most tokens that
        they may take; in environments, where nobody knows that, by their number. What begins together stays so."""
        episodes = {episode.id: episode for episode in asked}
        cut = self.cut(requests_of(asked, sampling), {} if until is None else self.begun)
        if until is not None and self.in_environments:
            self.begun = {number: engine for engine, part in enumerate(cut) for number in part}
        parts = [[episodes[number] for number in part] for part in cut]
        rows = [episode.row for episode in asked]

        def arrived(answer: PackedEpisodes) -> None:
            own = answer.unpacked(rows)
            episodes.update((episode.id, episode) for episode in own)
            if on_done and (ended := [episode for episode in own if episode.finished]):
                on_done(ended)

        others = None if until is None else Others(next(self.calls), self.engines)
        self.ask([[self.sent(part, until)] for part in parts], (sampling, others), arrived)
        return [episodes[episode.id] for episode in asked]

    def cut(self, requests: list[Request], begun: Mapping[int, int]) -> list[list[int]]:
        """Returns the ids of each engine's share. A conversation that has begun stays where its environment is."""
        parts: list[list[int]] = [[] for _ in range(self.engines)]
        for request in requests:
            if request.rows[0] in begun:
                parts[begun[request.rows[0]]] += request.rows
        new = [request for request in requests if request.rows[0] not in begun]
        work = [1 if self.in_environments else request.work for request in new]
        for engine, part in enumerate(balanced_order(work, self.engines)):
            parts[engine] += [number for index in part for number in new[index].rows]
        return parts

    def sent(self, part: list[Episode], until: Until | None) -> EpisodeShare:
        """Returns a process's share of the episodes as it travels."""
        rows = list({episode.group: episode.row for episode in part}.values())
        sent = rows if self.in_environments else [without_answer(row) for row in rows]
        head = None if until is None else [episode.id for episode in part if episode.id in until.keys]
        return EpisodeShare(sent, PackedEpisodes.of(part), head)

    def ask(self, parts: Parts, how: tuple[Sampling, Others | None], arrived: Callable[[PackedEpisodes], None]) -> None:
        self.ranks.map("rollout", Rollout.answer, parts, *how, arrived=arrived)

    def publish(self) -> Metrics:
        """Lets every engine take the actor's weights from its own process; returns the worst metrics."""
        answers = self.ranks.broadcast("rollout", Rollout.publish)
        return {name: max(metrics[name] for metrics in answers) for name in answers[0]}


class RolloutServers(ShardedRollout):
    """Rollout engines in a pool of their own: they take the actor's weights after each update, and prove it.

    Weights travel through the store of whoever runs the processes. Every rank of the actor gathers a bucket, the first
    one puts it there once, and every engine reads it. The driver asks for each bucket and hands it on: a process that
    dies on either side is named as in any other call, and a CPU takes the way that a GPU takes. A collective over both
    pools would spare copies through the host, but when one side dies the other hangs in it. An engine on its actor's
    GPU reads the bucket there: then every rank of the actor has one, and a handle of its memory travels.
    """

    def __init__(self, ranks: Ranks, engine_size: int, actor: ShardedPolicy, name: str):
        """`name`: that of the engines in the catalogue, for errors."""
        super().__init__(ranks, engine_size)
        self.actor, self.name = actor, name

    def wake(self) -> None:
        if any(self.actor.ranks.broadcast("sender", WeightSender.unsent)):
            self.publish()

    def sleep(self) -> None:
        """Frees nothing: the engines' memory is theirs, also on devices that they share."""

    def ask(self, parts: Parts, how: tuple[Sampling, Others | None], arrived: Callable[[PackedEpisodes], None]) -> None:
        self.ranks.map("server", RolloutServer.answer, parts, how[0], self.version, arrived=arrived)

    def publish(self) -> Metrics:
        with self.actor.on_device():
            self.send()
            return {"rollout/sync_gap": self.verify()}

    def send(self) -> None:
        last = False
        while not last:
            answers = self.actor.ranks.broadcast("sender", WeightSender.next_bucket)
            buckets = [bucket for bucket in answers if bucket is not None]
            self.ranks.map("server", RolloutServer.load_bucket, [[bucket] for bucket in buckets])
            last = buckets[0].last
        self.published = self.actor.ranks.broadcast("sender", WeightSender.finish)[0]

    def verify(self) -> float:
        """Returns the worst engine's gap between its log-probs and the actor's, for tokens that it draws."""
        trainers = self.actor.ranks
        prompt, sampling = trainers.broadcast("sender", WeightSender.question)[0]
        answers = self.ranks.map("server", RolloutServer.probe, [[prompt]] * self.engines, sampling)
        gaps, limit = trainers.broadcast("sender", WeightSender.gaps, prompt, answers)[0]
        for number, gap in enumerate(gaps):
            if not gap <= limit:
                layers = self.ranks.broadcast("server", RolloutServer.differing_layers)[number * self.engine_size]
                raise out_of_step(self.name, gap, limit, layers, f"engine {number} of {self.engines}")
        return max(gaps)


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


def without_answer(row: PromptRow) -> PromptRow:
    """Returns what an engine reads of a row: tests of a program in a row's ground truth may be large."""
    return replace(row, messages="", ground_truth=None, extra_info={}, written_prompt=None)


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
