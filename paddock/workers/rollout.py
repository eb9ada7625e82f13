"""The rollout: samples with the actor's weights in the process that trains them, and takes new weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.distributed import Store

from paddock.config.roles import RolloutConfig
from paddock.config.rollout_engines import engine_kind
from paddock.core.timing import Timer
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Completion, CopyEngine, Decoded, Prompt, RolloutEngine, Sampling, Until
from paddock.rollouts.conversations import OnEpisodes
from paddock.rollouts.environments import Environments, Sampler, roll_out
from paddock.rollouts.episode import Episode
from paddock.rollouts.packed import PackedEpisodes
from paddock.workers.policy import Policy
from paddock.workers.probe import sync
from paddock.workers.updates import Metrics
from paddock.workers.weight_sender import Bucket

LOOK = 0.05  # seconds of decode between two looks at what other engines have finished


@dataclass(frozen=True)
class EpisodeShare:
    """A rank's share of episodes, as it travels."""

    rows: list[PromptRow]
    """Rows of data that they answer."""
    episodes: PackedEpisodes
    head: list[int] | None
    """Ids of the responses that must be finished; None: all."""


@dataclass(frozen=True)
class Others:
    """Lets engines of a pool go on until each has finished what it must: a counter in the store that all can reach."""

    counter: str
    engines: int

    def until(self, asked: EpisodeShare, store: Store | None) -> Until:
        """Returns when this engine's session ends: it counts itself once it has finished its part."""
        assert store is not None and asked.head is not None
        counted: list[int] = []

        def all_have() -> bool:
            counted.append(store.add(self.counter, 0 if counted else 1))
            return counted[-1] >= self.engines

        if not len(asked.episodes.ids):  # no session to open
            all_have()
        return Until(asked.head, all_have, LOOK)


class Rollout(Sampler):
    """A rollout engine beside the actor: it runs the actor's own modules, or has a copy of their weights."""

    def __init__(self, engine: RolloutEngine, actor: Policy, limits: RolloutConfig, store: Store | None = None):
        """`store`: through which the engines of a pool tell each other how far they are."""
        self.engine, self.actor, self.limits, self.store = engine, actor, limits, store
        self.published = -1
        """Version of the actor's weights that a copy has; -1: none."""
        self.in_use = ExitStack()
        self.environments: Environments | None = None

    @property
    def version(self) -> int:
        """Returns the version of the actor's weights that the engine samples with."""
        return self.published if isinstance(self.engine, CopyEngine) else self.actor.version

    @contextmanager
    def awake(self, timer: Timer) -> Iterator[None]:
        """Holds the current weights where the engine reads them for the block; then frees what the engine held."""
        with timer("gen"):
            self.wake()
        try:
            yield
        finally:
            with timer("gen"):
                self.sleep()

    def wake(self) -> int:
        """Gathers the actor's weights, or publishes them if the copy is out of date; returns their version."""
        self.engine.wake()
        if isinstance(self.engine, CopyEngine):
            if self.engine.stale or self.published != self.actor.version:
                self.publish()
            return self.version
        self.actor.engine.move("device")
        self.in_use.callback(self.actor.engine.move, "host")
        self.in_use.enter_context(self.actor.engine.gathered())
        return self.version

    def sleep(self) -> Decoded | None:
        """Frees what the engine held; returns what it has decoded so far."""
        self.engine.sleep()
        self.in_use.close()
        return self.decoded

    @property
    def decoded(self) -> Decoded | None:
        return self.engine.decoded

    @property
    def ends_sooner(self) -> bool:
        return self.environments is None and engine_kind(self.limits.name).keeps_parts

    def open_environments(self, environments: Environments) -> None:
        """Takes the environments of the run: rows are answered in them from now on, where the engine is."""
        self.environments = environments

    def go_on(
        self,
        asked: list[Episode],
        sampling: Sampling,
        on_done: OnEpisodes | None = None,
        until: Until | None = None,
    ) -> list[Episode]:
        return roll_out(self.engine, self.version, asked, sampling, on_done, self.environments, until)

    def answer(self, asked: EpisodeShare, sampling: Sampling, others: Others | None) -> PackedEpisodes:
        """Returns a rank's share of the episodes with what was drawn of them."""
        end = others.until(asked, self.store) if others else None
        episodes = asked.episodes.unpacked(asked.rows)
        return PackedEpisodes.of(roll_out(self.engine, self.version, episodes, sampling, None, self.environments, end))

    def publish(self) -> Metrics:
        """Sends the actor's new weights to a copy of them, and verifies it; the actor's own modules have them."""
        self.published = self.actor.version
        return sync(self.actor.engine, self.engine, self.limits)


class RolloutServer:
    """A rollout engine in a pool of its own: the actor's weights arrive in buckets."""

    def __init__(self, engine: CopyEngine, device: torch.device, store: Store | None):
        self.engine, self.device, self.store = engine, device, store
        self.environments: Environments | None = None
        self.busy = 0.0
        """Seconds in which it answered."""

    def answer(self, asked: EpisodeShare, sampling: Sampling, others: Others | None, version: int) -> PackedEpisodes:
        """Returns a rank's share of the episodes with what was drawn of them."""
        begun = time.perf_counter()
        end = others.until(asked, self.store) if others else None
        episodes = asked.episodes.unpacked(asked.rows)
        drawn = PackedEpisodes.of(roll_out(self.engine, version, episodes, sampling, None, self.environments, end))
        self.busy += time.perf_counter() - begun
        return drawn

    def work(self) -> tuple[Decoded | None, float]:
        """Returns what was decoded so far, and in how many seconds."""
        return self.engine.decoded, self.busy

    def probe(self, prompt: Prompt, sampling: Sampling) -> list[Completion]:
        """Answers the prompt by which the driver verifies the weights."""
        return self.engine.generate([prompt], sampling)

    def load_bucket(self, bucket: Bucket) -> None:
        self.engine.load_bucket(bucket.unpacked(self.device), bucket.first, bucket.last)

    def differing_layers(self) -> list[str]:
        return self.engine.differing_layers()
