"""Episodes as arrays: so they travel between processes, and lie in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch

from paddock.core.batch import NOBODY
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Chosen, Prompt
from paddock.rollouts.batch import in_a_row
from paddock.rollouts.episode import Episode, Span, asks_its_own


@dataclass(frozen=True, eq=False)
class PackedEpisodes:
    """Holds the episodes of some rows, whose reader has the rows: prompts that are a row's own do not travel."""

    ids: np.ndarray
    groups: np.ndarray
    """Rows of data, by the id of their prompt."""
    done: np.ndarray
    steps: np.ndarray
    """Training step that each episode is drawn for; `finished`: False if tokens of it are to be drawn."""
    finished: np.ndarray
    counts: np.ndarray
    """Number of spans of each episode."""
    lengths: np.ndarray
    """Number of tokens of each span of all episodes, one after the other."""
    versions: np.ndarray
    """Version of the weights that drew each span; `rewards` has what was paid for it."""
    rewards: np.ndarray
    tokens: np.ndarray
    """Tokens of all spans, one after the other."""
    log_probs: np.ndarray
    """Log-probs of all spans of the policy, one after the other."""
    prompts: list[Prompt | None]
    """Prompt of each episode; None for the row's own, without a limit of its own."""
    experts: list[tuple[np.ndarray, np.ndarray]] | None
    """Experts of prompt and response, if the engine records them."""
    extras: list[Mapping[str, Any]] | None
    """Extras of each episode; None if no episode has any."""

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> PackedEpisodes:
        spans = [span for episode in episodes for span in episode.spans]
        chosen = [episode.experts for episode in episodes if episode.experts]
        return cls(
            ids=np.array([episode.id for episode in episodes], dtype=np.int64),
            groups=np.array([episode.group for episode in episodes], dtype=np.int64),
            done=np.array([episode.done for episode in episodes], dtype=bool),
            steps=np.array([episode.step for episode in episodes], dtype=np.int64),
            finished=np.array([episode.finished for episode in episodes], dtype=bool),
            counts=np.array([len(episode.spans) for episode in episodes], dtype=np.int64),
            lengths=np.array([len(span.tokens) for span in spans], dtype=np.int64),
            versions=np.array([span.version for span in spans], dtype=np.int64),
            rewards=np.array([span.reward for span in spans], dtype=np.float64),
            tokens=in_a_row((span.tokens for span in spans), np.int32),
            log_probs=in_a_row((span.log_probs or () for span in spans), np.float32),
            prompts=[
                episode.prompt if asks_its_own(episode) or episode.prompt.max_tokens is not None else None
                for episode in episodes
            ],
            experts=[(episode.prompt.numpy(), episode.response.numpy()) for episode in chosen] or None,
            extras=[episode.extras for episode in episodes] if any(episode.extras for episode in episodes) else None,
        )

    def unpacked(self, rows: Sequence[PromptRow]) -> list[Episode]:
        """Returns the episodes; `rows` are those that were asked, or more."""
        row_of, spans, count = {row.group: row for row in rows}, self.spans(), len(self.ids)
        own = [row_of[group] for group in self.groups.tolist()]
        experts: Iterator[Chosen | None] = repeat(None)
        if self.experts:
            experts = (Chosen(torch.tensor(prompt), torch.tensor(response)) for prompt, response in self.experts)
        facts = zip(self.ids.tolist(), own, self.prompts, self.counts.tolist(), self.done.tolist(),
                    islice(experts, count), self.extras or [{}] * count, self.steps.tolist(), self.finished.tolist(),
                    strict=True)  # fmt: skip
        return [
            Episode(number, row, prompt or Prompt(row.tokens, [number], row.images), list(islice(spans, size)), done,
                    chosen, extras=extras, step=step, finished=finished)
            for number, row, prompt, size, done, chosen, extras, step, finished in facts
        ]  # fmt: skip

    def spans(self) -> Iterator[Span]:
        """Yields the spans of all episodes, one after the other."""
        tokens, log_probs = iter(self.tokens.tolist()), iter(self.log_probs.tolist())
        spans = zip(self.lengths.tolist(), self.versions.tolist(), self.rewards.tolist(), strict=True)
        for length, version, reward in spans:
            drawn = None if version == NOBODY else list(islice(log_probs, length))
            yield Span(list(islice(tokens, length)), drawn, version, reward)
