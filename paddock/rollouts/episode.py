"""What was written for a prompt: an episode is a list of spans, and a span is what one author wrote in a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from paddock.core.batch import NOBODY
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Chosen, Completion, Prompt


@dataclass(frozen=True)
class Span:
    """Holds tokens that the policy or the environment wrote in a row, as they were drawn: none is decoded and encoded
    again.

    A span of your own, such as a demonstration, may stand in an episode that `sample` returned. Its `log_probs` are
    those of the policy that wrote it: losses read them as `old_log_probs`, whatever `version` it names.

    >>> import paddock
    >>> paddock.Span(tokens=[24, 21, 1], log_probs=[-0.2, -0.2, -0.1], version=0).reward
    0.0
    """

    tokens: list[int]
    """Token ids."""
    log_probs: list[float] | None = None
    """Log-probs of the tokens, by the policy that drew them; None if the environment wrote them."""
    version: int = NOBODY
    """Version of the weights that drew the tokens."""
    reward: float = 0.0
    """Reward that the environment paid for the span, at its last token."""

    def __post_init__(self) -> None:
        if (self.log_probs is None) != (self.version == NOBODY):
            raise ValueError("a span of the policy has log-probs and a version, one of the environment has neither")
        if self.log_probs is not None and len(self.log_probs) != len(self.tokens):
            raise ValueError(f"a span has {len(self.tokens)} tokens and {len(self.log_probs)} log-probs")
        if self.reward and not self.log_probs:
            raise ValueError("a reward is paid for tokens of the policy, and the span has none")


@dataclass(frozen=True)
class Episode:
    """Holds all spans behind one prompt: one turn of the policy, or several with what the environment wrote between
    them.

    >>> import paddock
    >>> with paddock.Run(logger=["file"]) as run:
    ...     first, second = run.sample(["12+34="], n=2)
    >>> first.group == second.group, len(first.spans), len(first.spans[0].tokens) == len(first.spans[0].log_probs)
    (True, 1, True)
    """

    id: int
    """Id of the response, unique in the run."""
    row: PromptRow
    """Row of data that it answers, with `ground_truth`, `data_source`, `extra_info`. `group`, also of the episode, is
    the id of the prompt: episodes of equal group answer the same one."""
    prompt: Prompt
    """Token ids of the prompt, which is the row's or an environment's own, and its images."""
    spans: list[Span]
    done: bool
    """True if the episode ended by itself, False if it was cut at a limit."""
    experts: Chosen | None = None
    """Experts that the tokens went to, if the engine records them."""
    text: str = ""
    """The response, decoded; where a program asked for it."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that the environment says of the episode."""
    step: int = 0
    """The training step that it is drawn for: its randomness."""
    finished: bool = True
    """False while tokens of it are still to be drawn."""

    @property
    def group(self) -> int:
        """Returns the id of the prompt: episodes of equal group answer the same one."""
        return self.row.group

    @property
    def response(self) -> list[Span]:
        """Returns the spans up to the last token of the policy: nothing is learnt from what stands behind it."""
        last = max((index for index, span in enumerate(self.spans) if span.log_probs), default=-1)
        return self.spans[: last + 1]


def begun(rows: Iterable[PromptRow], samples: int, step: int) -> list[Episode]:
    """Returns `samples` episodes for each row of which nothing is drawn yet; their ids are those of `prompt_batch`."""
    prompts = [(row, Prompt(row.tokens, list(ids_of(row, samples)), row.images)) for row in rows]
    return [
        Episode(number, row, prompt, [], done=False, step=step, finished=False)
        for row, prompt in prompts
        for number in prompt.rows
    ]


def ids_of(row: PromptRow, samples: int) -> range:
    """Returns the ids of the responses to a row."""
    return range(row.group * samples, (row.group + 1) * samples)


def continued(episode: Episode, part: Completion, version: int) -> Episode:
    """Returns an episode of one turn with what weights of this version drew of it."""
    spans, before = episode.spans, episode.spans[-1] if episode.spans else None
    if before is not None and before.version == version:
        assert before.log_probs is not None
        log_probs = before.log_probs + part.log_probs
        part, spans = replace(part, tokens=before.tokens + part.tokens, log_probs=log_probs), spans[:-1]
    return Episode(
        episode.id,
        episode.row,
        episode.prompt,
        [*spans, Span(part.tokens, part.log_probs, version)],
        done=part.stopped,
        experts=part.experts and part.experts.behind(len(episode.prompt.tokens)),
        step=episode.step,
        finished=part.finished,
    )


def asks_its_own(episode: Episode) -> bool:
    """True if an environment wrote the prompt, and not the row."""
    return episode.prompt.tokens is not episode.row.tokens


def tokens_of(episode: Episode) -> list[int]:
    """Returns the tokens of the response."""
    return [token for span in episode.response for token in span.tokens]


def turns_of(episode: Episode) -> list[list[int]]:
    """Returns the tokens of each turn of the policy. What an environment writes ends a turn."""
    parts = groupby((span for span in episode.response if span.tokens), key=lambda span: span.log_probs is not None)
    return [[token for span in spans for token in span.tokens] for drawn, spans in parts if drawn]


@dataclass
class Counts:
    """Counts what a conversation did, for metrics."""

    turns: int = 0
    said: int = 0
    """Turns of tools or the environment."""
    tool_call_counts: int = 0
    malformed_calls: int = 0
    failed_calls: int = 0
    """Calls that raised, took too long, or named no tool."""
    cut_results: int = 0
    """Results that were longer than `max_tool_response_length`."""
    timeouts: int = 0
    tool_seconds: float = 0.0

    def columns(self) -> dict[str, Any]:
        """Returns the counts as columns of a batch. `num_turns` counts the prompt too, as verl does."""
        return {"num_turns": 1 + self.turns + self.said, **{name: vars(self)[name] for name in COUNTED}}


COUNTED = ("tool_call_counts", "malformed_calls", "failed_calls", "cut_results", "timeouts", "tool_seconds")
COLUMNS = ("conversation", "completion", "environment", "ended", "extra_fields", "reward_score", "num_turns", *COUNTED)
"""What a batch of episodes carries beside tokens."""
