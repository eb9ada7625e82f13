"""Environments of GEM: `gem:game:GuessTheNumber-v0-easy`, `gem:rg:leg_counting`.

The observation and the suffix that GEM gives with it are one message. Environments over data sets of the hub (`math:`,
`code:`, `qa:`) load them when they are made, and need the network for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from paddock.environments.environment import Answer, Environment, Turn
from paddock.environments.packages import imported, require_known
from paddock.environments.reused import GameDraws, Reused

PACKAGE = "reasoning-gym nltk && pip install --no-deps gem-llm"
"""Without its dependencies: its pins of antlr4 and reasoning-gym do not go with omegaconf's and each other's."""


class Gem(Reused):
    """Plays one episode of an environment of GEM."""

    def begin(self, game: Any, seed: int) -> str:
        return with_suffix(*game.reset(seed=seed % 2**32))  # numpy takes no larger seeds

    def step(self, answer: Answer) -> Turn:
        with self.playing() as game:
            said, reward, terminated, truncated, info = game.step(answer.text)
        done = bool(terminated or truncated)
        return Turn([] if done else with_suffix(said, info), float(reward), done)


def with_suffix(said: str, info: Mapping[str, Any]) -> str:
    newline = "\n" if info.get("suffix") and not said.endswith("\n") else ""
    return f"{info.get('prefix', '')}{said}{newline}{info.get('suffix', '')}"


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes environments of this name; `kwargs` go to the constructor."""
    full = f"gem:{name}"
    gem = quietly_imported(full)
    known = imported("gem.envs.registration", PACKAGE, full).ENV_REGISTRY
    require_known(full, name, known, "GEM")

    def make() -> Any:
        with GameDraws(0).drawing():  # constructors reset
            return gem.make(name, **kwargs)

    free = [make()]  # what does not suit is told now
    return lambda: Gem(make, free)


def quietly_imported(name: str) -> ModuleType:
    """Returns GEM. Its import sets up logging for the whole program: that is undone."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        imported("gem.envs", PACKAGE, name)
        return imported("gem", PACKAGE, name)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
