"""What was written for a prompt: an episode is a list of spans, and a span is what one author wrote in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddock.core.batch import NOBODY
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

    row: int
    """Id of the response, unique in the run."""
    group: int
    """Id of the prompt: episodes of equal group answer the same one."""
    prompt: Prompt
    """Token ids of the prompt, and its images."""
    spans: list[Span]
    done: bool
    """True if the episode ended by itself, False if it was cut at a limit."""
    experts: Chosen | None = None
    """Experts that the tokens went to, if the engine records them."""
    text: str = ""
    """The response, decoded; where a program asked for it."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that the environment says of the episode."""

    @property
    def response(self) -> list[Span]:
        """Returns the spans up to the last token of the policy: nothing is learnt from what stands behind it."""
        last = max((index for index, span in enumerate(self.spans) if span.log_probs), default=-1)
        return self.spans[: last + 1]


def one_turn_each(
    completions: Sequence[Completion], prompts: Sequence[Prompt], groups: Sequence[int], version: int
) -> list[Episode]:
    """Returns completions as episodes of one span. They stand in the order of the prompts and of their rows."""
    asked = [(group, prompt) for group, prompt in zip(groups, prompts, strict=True) for _ in prompt.rows]
    return [one_turn(one, *own, version) for one, own in zip(completions, asked, strict=True)]


def one_turn(one: Completion, group: int, prompt: Prompt, version: int) -> Episode:
    """Returns a completion as an episode of one span."""
    span = Span(one.tokens, one.log_probs, version)
    return Episode(one.row, group, prompt, [span], done=one.stopped, experts=one.experts)
