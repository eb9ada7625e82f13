"""What a call of the engine asks for, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paddock.core.images import Images
from paddock.engines.rollout.base import Prompt, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt and the responses that start from one prefill of it."""

    tokens: list[int]
    rows: list[int]
    first: int  # index of its first response among the answers to the call
    limit: int
    """Tokens of a response."""
    images: Images | None = None

    @staticmethod
    def split(prompts: Iterable[Prompt], sampling: Sampling, most: int) -> list[Request]:
        """Splits prompts into requests that fit the slots; a prompt with more rows is prefilled again for the rest."""
        requests, first = [], 0
        for prompt in prompts:
            for start in range(0, len(prompt.rows), most):
                rows = prompt.rows[start : start + most]
                requests.append(Request(prompt.tokens, rows, first, prompt.limit(sampling), prompt.images))
                first += len(rows)
        return requests
