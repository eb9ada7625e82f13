"""The rollout: samples with the actor's weights in the process that trains them, and takes new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from paddock.config.roles import RolloutConfig
from paddock.core.timing import Timer
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Completion, CopyEngine, Prompt, RolloutEngine, Sampling
from paddock.rollouts.conversations import OnEpisodes
from paddock.rollouts.environments import Environments, roll_out
from paddock.rollouts.episode import Episode
from paddock.workers.policy import Policy
from paddock.workers.probe import sync
from paddock.workers.transport import PackedEpisodes
from paddock.workers.updates import Metrics
from paddock.workers.weight_sender import Bucket


class Rollout:
    """A rollout engine beside the actor: it runs the actor's own modules, or has a copy of their weights."""

    def __init__(self, engine: RolloutEngine, actor: Policy, limits: RolloutConfig):
        self.engine, self.actor, self.limits = engine, actor, limits
        self.published = -1
        """Version of the actor's weights that a copy has; -1: none."""
        self.in_use = ExitStack()
        self.environments: Environments | None = None

    @property
    def version(self) -> int:
        """Returns the version of the actor's weights that the engine samples with."""
        return self.published if isinstance(self.engine, CopyEngine) else self.actor.version

    @contextmanager
    def awake(self, time: Timer) -> Iterator[None]:
        """Holds the current weights where the engine reads them for the block; then frees what the engine held."""
        with time("gen"):
            self.wake()
        try:
            yield
        finally:
            with time("gen"):
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

    def sleep(self) -> None:
        self.engine.sleep()
        self.in_use.close()

    def open_environments(self, environments: Environments) -> None:
        """Takes the environments of the run: rows are answered in them from now on, where the engine is."""
        self.environments = environments

    def episodes(
        self, rows: list[PromptRow], samples: int, sampling: Sampling, on_done: OnEpisodes | None = None
    ) -> list[Episode]:
        return roll_out(self.engine, self.version, rows, samples, sampling, on_done, self.environments)

    def answer(self, rows: list[PromptRow], samples: int, sampling: Sampling) -> PackedEpisodes:
        """Returns the episodes of a rank's share of the rows as they travel to the driver."""
        return PackedEpisodes.of(self.episodes(rows, samples, sampling))

    def publish(self) -> Metrics:
        """Sends the actor's new weights to a copy of them, and verifies it; the actor's own modules have them."""
        self.published = self.actor.version
        return sync(self.actor.engine, self.engine, self.limits)


class RolloutServer:
    """A rollout engine in a pool of its own: the actor's weights arrive in buckets."""

    def __init__(self, engine: CopyEngine, device: torch.device):
        self.engine, self.device = engine, device
        self.environments: Environments | None = None

    def answer(self, rows: list[PromptRow], samples: int, sampling: Sampling, version: int) -> PackedEpisodes:
        """Returns the episodes of a rank's share of the rows as they travel to the driver."""
        return PackedEpisodes.of(roll_out(self.engine, version, rows, samples, sampling, None, self.environments))

    def probe(self, prompt: Prompt, sampling: Sampling) -> list[Completion]:
        """Answers the prompt by which the driver verifies the weights."""
        return self.engine.generate([prompt], sampling)

    def load_bucket(self, bucket: Bucket) -> None:
        self.engine.load_bucket(bucket.unpacked(self.device), bucket.first, bucket.last)

    def differing_layers(self) -> list[str]:
        return self.engine.differing_layers()
