"""Rollout engines in many processes: beside the actor's ranks, or in a pool of their own."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean

from paddock.core.balance import balanced_order
from paddock.core.batch import NOBODY
from paddock.core.timing import Timer
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Decoded, Request, Sampling, Until
from paddock.rollouts.conversations import OnEpisodes
from paddock.rollouts.environments import Environments, Sampler, requests_of
from paddock.rollouts.episode import Episode
from paddock.rollouts.packed import PackedEpisodes
from paddock.workers.probe import out_of_step
from paddock.workers.rank import Rank
from paddock.workers.rollout import EpisodeShare, Others, Rollout, RolloutServer
from paddock.workers.sharded import Pending, Ranks, ShardedPolicy
from paddock.workers.updates import Metrics
from paddock.workers.weight_sender import Bucket, WeightSender

Parts = Sequence[Sequence[EpisodeShare]]


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
    def awake(self, timer: Timer) -> Iterator[None]:
        """See `Rollout.awake`. After an error nobody is put to sleep: ranks that are left may not answer."""
        with timer("gen"):
            self.wake()
        yield
        with timer("gen"):
            self.sleep()

    def wake(self) -> None:
        self.published = self.ranks.broadcast("rollout", Rollout.wake)[0]

    def sleep(self) -> None:
        self.counted = Decoded.side_by_side(self.ranks.broadcast("rollout", Rollout.sleep))

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
        rows = [episode.row for episode in asked]

        def arrived(answer: PackedEpisodes) -> None:
            own = answer.unpacked(rows)
            episodes.update((episode.id, episode) for episode in own)
            if on_done and (ended := [episode for episode in own if episode.finished]):
                on_done(ended)

        others = None if until is None else Others(next(self.calls), self.engines)
        self.begin(self.shares(asked, sampling, until), sampling, others).wait(arrived)
        return [episodes[episode.id] for episode in asked]

    def shares(self, asked: list[Episode], sampling: Sampling, until: Until | None) -> Parts:
        """Returns each engine's share of the episodes as it travels."""
        episodes = {episode.id: episode for episode in asked}
        cut = self.cut(requests_of(asked, sampling), {} if until is None else self.begun)
        if until is not None and self.in_environments:
            self.begun = {number: engine for engine, part in enumerate(cut) for number in part}
        return [[self.sent([episodes[number] for number in part], until)] for part in cut]

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

    def begin(self, parts: Parts, sampling: Sampling, others: Others | None) -> Pending[PackedEpisodes]:
        return self.ranks.begin("rollout", Rollout.answer, parts, sampling, others)

    def publish(self) -> Metrics:
        """Lets every engine take the actor's weights from its own process; returns the worst metrics."""
        answers = self.ranks.broadcast("rollout", Rollout.publish)
        return {name: max(metrics[name] for metrics in answers) for name in answers[0]}


@dataclass(frozen=True)
class RunningOn:
    """Episodes that engines go on with beside the training."""

    counter: str
    """By which the driver ends it."""
    pending: Pending[PackedEpisodes]
    rows: list[PromptRow]


class RolloutServers(ShardedRollout):
    """Rollout engines in a pool of their own: they take the actor's weights after each update, and prove it.

    Weights travel through the store of whoever runs the processes. Every rank of the actor gathers a bucket, the first
    one puts it there once, and every engine reads it. The driver asks for each bucket and hands it on: a process that
    dies on either side is named as in any other call, and a CPU takes the way that a GPU takes. A collective over both
    pools would spare copies through the host, but when one side dies the other hangs in it. An engine on its actor's
    GPU reads the bucket there: then every rank of the actor has one, and a handle of its memory travels.
    """

    runs_on = True

    def __init__(self, ranks: Ranks, engine_size: int, actor: ShardedPolicy, name: str, beside: bool):
        """`name`: that of the engines in the catalogue, for errors. `beside`: they are on the actor's devices."""
        super().__init__(ranks, engine_size)
        self.actor, self.name, self.beside = actor, name, beside
        self.busy, self.slept = 0.0, time.perf_counter()
        """Seconds in which an engine worked, in the mean, and the end of the rollout before."""
        self.running: RunningOn | None = None
        self.drawn: dict[int, Episode] = {}
        """Episodes that went on beside the training, as they were left."""

    def wake(self) -> None:
        if any(self.actor.ranks.broadcast("sender", WeightSender.unsent)):
            self.publish()
        self.stop()

    def sleep(self) -> None:
        """Frees nothing: the engines' memory is theirs, also on devices that they share."""
        work = self.ranks.broadcast("server", RolloutServer.work)
        self.counted = Decoded.side_by_side(count for count, _ in work)
        busy, now = fmean(seconds for _, seconds in work), time.perf_counter()
        self.idle = now - self.slept - (busy - self.busy)
        self.busy, self.slept = busy, now

    def begin(self, parts: Parts, sampling: Sampling, others: Others | None) -> Pending[PackedEpisodes]:
        return self.ranks.begin("server", RolloutServer.answer, parts, sampling, others, self.version)

    def go_on(
        self,
        asked: list[Episode],
        sampling: Sampling,
        on_done: OnEpisodes | None = None,
        until: Until | None = None,
    ) -> list[Episode]:
        self.stop()
        if until is None:
            return super().go_on(asked, sampling, on_done)
        asked, self.drawn = [self.drawn.get(episode.id, episode) for episode in asked], {}
        left = [episode for episode in asked if not episode.finished]
        if not any(episode.id in until.keys for episode in left):
            return asked
        went_on = {episode.id: episode for episode in super().go_on(left, sampling, on_done, until)}
        return [went_on.get(episode.id, episode) for episode in asked]

    def run_on(self, asked: list[Episode], sampling: Sampling) -> None:
        self.stop()
        known = {episode.id: self.drawn.get(episode.id, episode) for episode in asked}
        left = [episode for episode in known.values() if not episode.finished]
        self.drawn = known
        if left:
            counter = next(self.calls)
            parts = self.shares(left, sampling, Until(()))
            pending = self.begin(parts, sampling, Others(counter, self.engines + 1))  # the last to count is the driver
            self.running = RunningOn(counter, pending, [episode.row for episode in left])

    def stop(self) -> None:
        """Ends what goes on beside the training, and keeps what was drawn."""
        if self.running is not None:
            running, self.running = self.running, None
            self.ranks.count(running.counter)
            for answer in running.pending.wait():
                self.drawn |= {episode.id: episode for episode in answer.unpacked(running.rows)}

    def publish(self) -> Metrics:
        with self.actor.on_device():
            self.send()
            return {"rollout/sync_gap": self.verify()}

    def send(self) -> None:
        """Sends the actor's weights bucket by bucket. While engines are at work, buckets wait in the store, and are
        loaded once all have come."""
        last, staged = False, list[list[Bucket]]()
        while not last:
            answers = self.actor.ranks.broadcast("sender", WeightSender.next_bucket)
            buckets = [bucket for bucket in answers if bucket is not None]
            last = buckets[0].last
            staged.append(buckets)
            if self.running is None or last or self.beside:  # a bucket on a device is there until the next
                self.stop()
                for waiting in staged:
                    self.ranks.map("server", RolloutServer.load_bucket, [[bucket] for bucket in waiting])
                staged.clear()
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


def without_answer(row: PromptRow) -> PromptRow:
    """Returns what an engine reads of a row: tests of a program in a row's ground truth may be large."""
    return replace(row, messages="", ground_truth=None, extra_info={}, written_prompt=None)
