"""Episodes between `Run.sample` and `Run.score`: a program may change them, and add spans of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paddock.core.batch import GIVEN
from paddock.data.loader import prompt_batch
from paddock.rewards.scoring import Scoring
from paddock.rollouts.batch import with_prompts, with_responses
from paddock.rollouts.collect import Drawn
from paddock.rollouts.episode import Episode, Span, tokens_of

DRAWN = "drawn"
"""Name under which an episode's extras have the spans that the run's own weights and environment wrote."""


def with_origin(episodes: Sequence[Episode], decode: Callable[[Sequence[list[int]]], list[str]]) -> list[Episode]:
    """Returns the episodes with their texts, and with their spans as they were drawn."""
    texts = decode([tokens_of(episode) for episode in episodes])
    return [
        replace(episode, text=text, extras={**episode.extras, DRAWN: episode.spans})
        for episode, text in zip(episodes, texts, strict=True)
    ]


def without_origin(episode: Episode) -> Episode:
    """Returns the episode without the extras of `with_origin`. Spans with log-probs that it did not draw are
    `GIVEN`."""
    drawn = episode.extras.get(DRAWN, ())

    def marked(span: Span) -> Span:
        own = any(span.tokens == one.tokens and span.log_probs == one.log_probs for one in drawn)
        return span if own or span.log_probs is None else replace(span, version=GIVEN)

    extras = {name: value for name, value in episode.extras.items() if name != DRAWN}
    return replace(episode, spans=[marked(span) for span in episode.spans], extras=extras)


def as_drawn(episodes: Sequence[Episode], pad: int, scoring: Scoring) -> Drawn:
    """Returns episodes as a rollout gives them, to be scored."""
    own = [without_origin(episode) for episode in episodes]
    rows = prompt_batch([episode.row for episode in own], 1, pad).with_(row=torch.tensor([one.id for one in own]))
    return Drawn(with_responses(with_prompts(rows, own, pad), own, pad), scoring, dict(enumerate(own)))
