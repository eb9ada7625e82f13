"""What environments of Gym's kind share: objects that are reset and used again, and global random numbers.

Their games draw from the generators of `random` and numpy that the whole process shares, and episodes run side by side.
`GameDraws` gives each episode a state of its own, so that a seed decides a game whatever else plays. A thread that
draws from them without `GameDraws` in that moment takes numbers of a game; nothing of ours does: our randomness is
counted.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from paddock.environments.environment import Environment, Message, messages_said

TURN = threading.RLock()
"""Held while an episode draws from the global generators."""


class GameDraws:
    """Keeps the state that the global generators have for one episode."""

    def __init__(self, seed: int):
        self.python = random.Random(seed).getstate()
        self.numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, `random` and `numpy.random` draw as this episode; outside they go on as before."""
        with TURN:
            others = random.getstate(), np.random.get_state()
            random.setstate(self.python)
            np.random.set_state(self.numpy)
            try:
                yield
            finally:
                self.python, self.numpy = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])


class Reused(Environment, ABC):
    """Plays an episode on a game that is used again: to make it may take reading a dictionary, to reset it does not."""

    def __init__(self, make: Callable[[], Any], free: list[Any]):
        """`free` holds games that no episode plays."""
        self.make, self.free = make, free
        self.game: Any = None

    @contextmanager
    def playing(self) -> Iterator[Any]:
        """Yields the game, which draws as this episode inside. `close` gives back no game that is still played, as one
        is that took too long, nor one that raised."""
        try:
            game, self.game = self.game or self.free.pop(), None
        except IndexError:
            game = self.make()
        with self.draws.drawing():
            yield game
        self.game = game

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self.draws = GameDraws(seed)
        with self.playing() as game:
            return asked(row, self.begin(game, seed))

    @abstractmethod
    def begin(self, game: Any, seed: int) -> str:
        """Begins a game; returns what it says."""

    def close(self) -> None:
        if self.game is not None:
            self.free.append(self.game)
            self.game = None


def asked(row: Mapping[str, Any], text: str) -> list[Message]:
    """Returns the first prompt of a game: system messages of the row's own prompt, then the text as the user's."""
    own = messages_said(row.get("prompt") or [])
    return [one for one in own if one["role"] == "system"] + messages_said(text)
