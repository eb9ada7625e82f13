"""The batches that are drawn and not trained yet: rollouts that run ahead of the training by whole batches.

Step s trains the prompts that it would train if nothing ran ahead, so a token is at most `staleness` versions old by
construction, no response is dropped for its age, and nothing new is drawn while an update runs: no thread and no queue
is needed. A response has no tokens, some or all; what it lacks is drawn by the weights of the step that draws it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paddock.data.dataset import PromptRow
from paddock.data.loader import Loader
from paddock.engines.rollout.base import Prompt
from paddock.rollouts.episode import Episode, begun
from paddock.rollouts.packed import PackedEpisodes

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class DrawnBatch:
    """The prompts that a step will train, with their responses so far."""

    step: int
    ahead: int
    """Steps between the one that drew the prompts and this one: the most versions that a token may be old."""
    place: State
    """The loader's place before the first of the prompts."""
    rows: list[PromptRow]
    episodes: dict[int, Episode]
    """By id, in the order of the batch."""

    @property
    def finished(self) -> bool:
        return all(episode.finished for episode in self.episodes.values())

    @property
    def groups(self) -> set[int]:
        return {row.group for row in self.rows}

    def require_young(self, version: int) -> None:
        """Asserts that no token is older than it may be when weights of this version train on it."""
        spans = [span for episode in self.episodes.values() for span in episode.spans]
        oldest = min((span.version for span in spans if span.log_probs), default=version)
        assert version - oldest <= self.ahead, f"a token is {version - oldest} versions old"


class Window:
    """Holds at most `staleness` + 1 batches, in the order in which they are trained."""

    def __init__(self, loader: Loader, prompts: int, samples: int, staleness: int, last: int):
        """`prompts` a batch, with `samples` responses each; `last`: step behind which nothing is drawn."""
        self.loader, self.prompts, self.samples = loader, prompts, samples
        self.staleness, self.last = staleness, last
        self.batches: deque[DrawnBatch] = deque()

    @property
    def held(self) -> Sequence[DrawnBatch]:
        """Returns the batches of which a checkpoint must know."""
        return self.batches

    def fill(self, step: int) -> DrawnBatch:
        """Draws the prompts of each step up to `step` + staleness; returns the batch of `step`. Steps that a program
        trained on rows of its own make what waits older."""
        late = step - self.batches[0].step if self.batches else 0
        if late:
            older = (replace(batch, step=batch.step + late, ahead=batch.ahead + late) for batch in self.batches)
            self.batches = deque(older)
        first = self.batches[-1].step + 1 if self.batches else step
        for number in range(first, min(step + self.staleness, self.last) + 1):
            self.draw(number, number - step)
        return self.batches[0]

    def draw(self, step: int, ahead: int) -> None:
        place, rows = self.loader.state_dict(), self.loader.next_prompts(self.prompts)
        episodes = {episode.id: episode for episode in begun(rows, self.samples, step)}
        assert not any(episodes.keys() & batch.episodes.keys() for batch in self.held), "an id was drawn twice"
        self.batches.append(DrawnBatch(step, ahead, place, rows, episodes))

    def unfinished(self) -> list[Episode]:
        """Returns the responses that lack tokens, in the order in which they are trained."""
        return [episode for batch in self.batches for episode in batch.episodes.values() if not episode.finished]

    def take(self, episodes: Iterable[Episode]) -> None:
        """Puts responses in the place of what was there of them."""
        batch_of = {number: batch for batch in self.batches for number in batch.episodes}
        for episode in episodes:
            batch_of[episode.id].episodes[episode.id] = episode

    def pop(self, version: int) -> DrawnBatch:
        """Returns the first batch, which weights of this version are about to train on."""
        batch = self.batches.popleft()
        assert batch.finished, "a batch is trained when its last response is finished"
        batch.require_young(version)
        return batch

    def counts(self) -> dict[str, float]:
        """Returns how many responses of later steps are finished, how many have begun, and their tokens."""
        waiting = [episode for batch in self.batches for episode in batch.episodes.values()]
        started = [sum(len(span.tokens) for span in episode.spans) for episode in waiting if not episode.finished]
        return {
            "rollout/window/ready": float(sum(episode.finished for episode in waiting)),
            "rollout/window/carried_rows": float(sum(tokens > 0 for tokens in started)),
            "rollout/window/carried_tokens": float(sum(started)),
        }

    def state(self) -> State:
        """Returns the batches by their places among the prompts, and the responses that have begun; episodes of
        environments begin anew, whose state nobody can keep."""
        batches = [{"step": batch.step, "ahead": batch.ahead, "place": batch.place} for batch in self.held]
        begun = [
            episode
            for batch in self.held
            for episode in batch.episodes.values()
            if episode.spans and not episode.extras
        ]
        return {"batches": batches, "begun": begun, "decided": {}}

    def load_state(self, batches: list[State], begun: State, decided: State | None = None) -> None:
        """Goes on with the batches of a checkpoint, also of a run that drew further ahead."""
        place = self.loader.state_dict()
        self.batches.clear()
        for batch in batches:
            self.loader.load_state_dict(batch["place"])
            self.draw(batch["step"], batch["ahead"])
        self.loader.load_state_dict(place)
        drawn = {number: episode for batch in self.batches for number, episode in batch.episodes.items()}
        saved = from_tensors(begun, [episode.row for episode in drawn.values()])
        self.take(replace(episode, prompt=drawn[episode.id].prompt) for episode in saved)


def to_tensors(episodes: Sequence[Episode]) -> State:
    """Returns episodes as a checkpoint keeps them."""
    packed = vars(PackedEpisodes.of(episodes))
    columns = {name: torch.tensor(value) for name, value in packed.items() if isinstance(value, np.ndarray)}
    return columns | {"experts": [tuple(map(torch.tensor, pair)) for pair in packed["experts"] or ()]}


def from_tensors(state: State, rows: Sequence[PromptRow]) -> list[Episode]:
    """Returns the episodes of `to_tensors`; `rows` are those that they answer, or more."""
    columns = {name: value.numpy() for name, value in state.items() if name != "experts"}
    experts = [(prompt.numpy(), response.numpy()) for prompt, response in state["experts"]]
    prompts: list[Prompt | None] = [None] * len(columns["ids"])
    return PackedEpisodes(**columns, prompts=prompts, experts=experts or None, extras=None).unpacked(rows)
