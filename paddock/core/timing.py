"""Where a step's seconds go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

PHASE = "phase"
"""Attribute of an error: the innermost phase that it has ended."""
BY_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")


class Timer:
    """``with timer("gen"): ...`` adds the seconds of the block to the phase; phases may repeat and nest."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running: set[str] = set()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if phase in self._running:  # the enclosing block counts these seconds already
            yield
            return
        self._running.add(phase)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            vars(error).setdefault(PHASE, phase)
            raise
        finally:
            self.seconds[phase] += time.perf_counter() - start
            self._running.remove(phase)

    def metrics(self, response_tokens: int, all_tokens: int) -> dict[str, float]:
        """``timing_s/*``, and ``timing_per_token_ms/*``: gen by response tokens, the other phases by all tokens."""
        per_token = {"gen": response_tokens} | dict.fromkeys(BY_ALL_TOKENS, all_tokens)
        found = {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
        for phase, tokens in per_token.items():
            if phase in self.seconds and tokens:
                found[f"timing_per_token_ms/{phase}"] = 1000 * self.seconds[phase] / tokens
        return found

    def reset(self) -> None:
        self.seconds.clear()
