"""A reward of several parts: rules and functions that each score a batch, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddock.errors import UserError
from paddock.rewards.rules import Scorer
from paddock.rewards.score import Score, ScoreRequest
from paddock.rewards.scoring import NO_RULE, BatchScoring, Scoring
from paddock.rewards.threads import ThreadPool


@dataclass(frozen=True)
class Component:
    """One rule or function of a reward, and how it is called."""

    name: str
    weight: float
    scorer: Scorer
    rule: bool


class JointScoring:
    """The responses of one batch, scored by every component. Those that take one response begin as it comes."""

    def __init__(self, components: Sequence[Component], scorings: Sequence[Scoring]):
        self.components, self.scorings = components, scorings
        self.whole = any(isinstance(scoring, BatchScoring) or scoring.reads_prompts for scoring in scorings)

    def add(self, requests: Mapping[int, ScoreRequest | None]) -> None:
        lean = {index: request and alone(request) for index, request in requests.items()} if self.whole else requests
        apart = {index: request and replace(request, environment=None) for index, request in requests.items()}
        for scoring in self.scorings:
            whole = requests if isinstance(scoring.pool, ThreadPool) else apart
            scoring.add(whole if isinstance(scoring, BatchScoring) or scoring.reads_prompts else lean)

    def collect(self) -> list[Score]:
        """Returns the scores in the order of the indices."""
        for scoring in self.scorings:
            scoring.start()
        return combined(self.components, [scoring.collect() for scoring in self.scorings])

    def __contains__(self, index: int) -> bool:
        return index in self.scorings[0]


def combined(components: Sequence[Component], columns: Sequence[Sequence[Score]]) -> list[Score]:
    """For each row the weighted sum of its components' scores, with each component's own value among the extras."""
    return [summed(components, scores) for scores in zip(*columns, strict=True)]


def summed(components: Sequence[Component], scores: Sequence[Score]) -> Score:
    if scores[0] is NO_RULE:
        return NO_RULE
    found: dict[str, Any] = {
        part.name: score.value if score.applies else None for part, score in zip(components, scores, strict=True)
    }
    for part, score in zip(components, scores, strict=True):
        for name, value in score.extras.items():
            if name in found:
                raise _ambiguous(part, name)
            found[name] = value
    return Score(
        sum(part.weight * score.value for part, score in zip(components, scores, strict=True)),
        found,
        timed_out=any(score.timed_out for score in scores),
        undecided=any(score.undecided for score in scores),
        cached=all(score.cached for score in scores),
        retries=sum(score.retries for score in scores),
        applies=any(score.applies for score in scores),
    )


def _ambiguous(part: Component, name: str) -> UserError:
    return UserError(
        f"returns {name!r} beside its score, and another value has that name: each is a column and a metric",
        key="reward" if part.rule else "custom_reward_function.path",
        value=part.name if part.rule else str(part.scorer.target),
        fix="return it under another name, or return the score alone",
    )


def alone(request: ScoreRequest) -> ScoreRequest:
    """The request without what only functions of TRL's contract read: it need not travel to other processes."""
    return replace(request, prompt=None, tokens=(), steps=(0, 0), environment=None)
