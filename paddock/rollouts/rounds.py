"""The rounds of `filter_groups`: prompts are drawn until enough of their groups tell the policy something."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch

from paddock.algorithms.selection import GroupBuffer, group_metric
from paddock.config.schema import FilterGroupsConfig
from paddock.core.batch import Batch
from paddock.data.loader import Loader
from paddock.rollouts.window import DrawnBatch, State, Window


class Rounds(Window):
    """Holds rounds of prompts in the order of their draw. A step trains the next informative groups, once all groups
    before them are decided; what a round has beyond that waits, or is dropped if nothing may run ahead.

    A round is drawn as soon as it is certain to be needed, while others are still being answered, and as far ahead as
    its groups are trained within `staleness` steps.
    """

    def __init__(
        self, loader: Loader, prompts: int, samples: int, staleness: int, last: int, needed: int,
        filtering: FilterGroupsConfig,
    ):  # fmt: skip
        """`prompts` a round; `needed`: informative groups of a step."""
        super().__init__(loader, prompts, samples, staleness, last)
        self.needed, self.metric, self.most = needed, filtering.metric, filtering.max_num_gen_batches
        self.buffer = GroupBuffer(needed, self.most)
        self.decided: deque[DrawnBatch] = deque()
        """Rounds of which informative groups wait."""
        self.gone: set[int] = set()
        """Groups of those rounds that have been trained."""
        self.hopeless = 0
        """Groups of the first round that are known to be uninformative before its last response is finished."""
        self.again = 0
        """Rounds at the front that an earlier run has decided."""
        self.step = 0

    @property
    def held(self) -> list[DrawnBatch]:
        return [*self.decided, *self.batches]

    @property
    def backlog(self) -> int:
        """Returns how many groups wait or may still turn out to be informative."""
        return len(self.buffer.groups) + sum(len(batch.rows) for batch in self.batches) - self.hopeless

    @property
    def lacks(self) -> bool:
        """True if the step needs another round, whatever those that are drawn turn out to be."""
        spent = 0 < self.most <= self.buffer.rounds + len(self.batches)
        return self.backlog < self.needed and not spent

    def fill(self, step: int) -> DrawnBatch:
        """Draws the rounds that are certain to be needed or may run ahead; returns the first that is not decided."""
        late = step - 1 - self.step if self.step else 0
        if late > 0:  # steps that a program trained on rows of its own
            self.batches = deque(replace(batch, ahead=batch.ahead + late) for batch in self.batches)
            self.decided = deque(replace(batch, ahead=batch.ahead + late) for batch in self.decided)
        self.step = step
        steps = min(self.staleness, self.last - step) + 1
        while self.lacks or (self.staleness and self.backlog + self.prompts <= steps * self.needed):
            self.draw(step, self.staleness)
        return self.batches[0]

    def pop(self, version: int) -> DrawnBatch:
        """Returns the first round that is not decided, which is about to be."""
        self.decided.append(super().pop(version))
        self.hopeless = 0
        return self.decided[-1]

    def decide(self, batch: Batch) -> bool:
        """Keeps the informative groups of the scored round; returns False if an earlier run has decided it."""
        left = ~torch.isin(batch.group, torch.tensor(sorted(self.gone), dtype=batch.group.dtype))
        batch = batch.rows(left)
        self.buffer.add(batch, group_metric(batch, self.metric))
        new, self.again = not self.again, max(0, self.again - 1)
        self.buffer.rounds -= not new
        return new

    def train(self, version: int) -> tuple[Batch, dict[str, float]]:
        """Returns the groups that weights of this version are about to train on, and how many groups are dropped."""
        batch = self.buffer.take()
        groups = set(batch.group.tolist())
        for drawn in self.decided:
            chosen = [episode for episode in drawn.episodes.values() if episode.group in groups]
            replace(drawn, episodes={episode.id: episode for episode in chosen}).require_young(version)
        surplus = 0 if self.staleness else len(self.buffer.groups)
        if surplus:
            self.buffer = GroupBuffer(self.needed, self.most)
        self.decided = deque(drawn for drawn in self.decided if drawn.groups & self.buffer.groups)
        self.gone = (self.gone | groups) & set().union(*(drawn.groups for drawn in self.decided))
        return batch, {"rollout/window/dropped/surplus": float(surplus)}

    def counts(self) -> dict[str, float]:
        counts = super().counts()
        counts["rollout/window/ready"] += len(self.buffer.groups) * self.samples
        return counts

    def state(self) -> State:
        return super().state() | {"decided": {"rounds": len(self.decided), "trained": sorted(self.gone)}}

    def load_state(self, batches: list[State], begun: State, decided: State | None = None) -> None:
        """Goes on with the rounds of a checkpoint; those that were decided are scored and decided again."""
        super().load_state(batches, begun)
        decided = decided or {}
        self.again, self.gone = decided.get("rounds", 0), set(decided.get("trained", ()))
