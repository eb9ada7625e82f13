"""Games of TextArena for one player: `textarena:GuessTheNumber-v0`.

A turn of the policy is an action; what the game says to it is the next message, without the history that TextArena's
observation wrappers repeat. Its action wrappers stay: they put an action in brackets that has none. A game pays once,
at its end. Games for several players are refused: nobody is there to play the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from paddock.environments.environment import Answer, Environment, Turn
from paddock.environments.packages import imported, refused, require_known
from paddock.environments.reused import GameDraws, Reused

log = logging.getLogger(__name__)

SEVERAL = "a game of one player, e.g. textarena:GuessTheNumber-v0, Mastermind-v0, Wordle-v0, Sokoban-v0, Minesweeper-v0"


class TextArena(Reused):
    """Plays one game of TextArena as player 0."""

    def begin(self, game: Any, seed: int) -> str:
        game.reset(num_players=1, seed=seed)
        return news(game)

    def step(self, answer: Answer) -> Turn:
        with self.playing() as game:
            done, _ = game.step(action=answer.text)
            if not done:
                return Turn(news(game))
            rewards, _ = game.close()
            return Turn(reward=paid(rewards[0], game), done=True)


def paid(reward: Any, game: Any) -> float:
    """Returns what a game pays; nothing, with a warning, if it is no number: some games mix it up with its reason."""
    try:
        return float(reward)
    except (TypeError, ValueError):
        warn_of(type(inner(game)).__name__, f"{reward!r:.80}")
        return 0.0


@cache
def warn_of(game: str, reward: str) -> None:
    log.warning("textarena's %s pays %s, which is no number: 0 counts", game, reward)


def inner(game: Any) -> Any:
    """Returns the game without its wrappers."""
    arena = imported("textarena", "textarena", "textarena")
    while isinstance(game, arena.Wrapper):
        game = game.env
    return game


def news(game: Any) -> str:
    """Returns what the game said since the last turn, less the player's own action."""
    arena = imported("textarena", "textarena", "textarena")
    _, heard = inner(game).get_observation()
    return "\n".join(str(message) for _, message, kind in heard if kind is not arena.ObservationType.PLAYER_ACTION)


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes games of this name; `kwargs` go to the game's constructor."""
    full = f"textarena:{name}"
    arena = imported("textarena", "textarena", full)
    known = imported("textarena.envs.registration", "textarena", full).ENV_REGISTRY
    require_known(full, name, known, "TextArena")
    share_dictionaries()

    def make() -> Any:
        try:
            return arena.make(name, **kwargs)
        except LookupError as error:
            if "nltk" not in str(error).lower():
                raise
            fix = "python -m nltk.downloader words averaged_perceptron_tagger_eng, on a machine with a network"
            raise refused(full, "needs word lists of NLTK, which are not on this machine", fix) from error

    free = [of_one_player(make(), full)]
    return lambda: TextArena(make, free)


@cache
def share_dictionaries() -> None:
    """Has all word games read one dictionary: to load it takes over a second, each game would, and none changes it."""
    kind = imported("textarena.envs.utils.word_lists", "textarena", "textarena").EnglishDictionary
    load, one_at_a_time, loaded = kind.__init__, threading.Lock(), {}

    def shared(self: Any, *args: Any, **kwargs: Any) -> None:
        key = args, tuple(sorted(kwargs.items()))
        with one_at_a_time:
            if key not in loaded:
                load(self, *args, **kwargs)
                loaded[key] = vars(self)
        vars(self).update(loaded[key])

    kind.__init__ = shared


def of_one_player(game: Any, name: str) -> Any:
    """Returns the game; one that takes more players is refused."""
    arena = imported("textarena", "textarena", name)
    try:
        with GameDraws(0).drawing():
            game.reset(num_players=1, seed=0)
    except (AssertionError, ValueError) as error:
        if "player" not in str(error).lower():
            raise
        raise refused(name, f"is a game of several players, and there is one policy ({error})", SEVERAL) from error
    if not isinstance(game.state, arena.SinglePlayerState):
        raise refused(name, "is a game of several players, and there is one policy", SEVERAL)
    return game
