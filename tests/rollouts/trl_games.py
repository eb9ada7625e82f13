"""Games that stand for OpenEnv's servers, whose clients TRL's example scripts import. A game is always the same one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

COLUMNS, ROWS = 5, 10
WORD = "crane"
FILLED = {(0, 0), (4, 4), (8, 8)}  # cells that the player is to fill


def solution() -> list[list[int]]:
    """Returns a filled sudoku: rows are the first one, moved."""
    return [[(3 * (row % 3) + row // 3 + column) % 9 + 1 for column in range(9)] for row in range(9)]


class Sudoku:
    """Takes moves such as [1 1 5]; its text holds all that was said, as TextArena's does."""

    def __init__(self) -> None:
        self.truth = solution()
        self.grid = [
            [0 if (row, column) in FILLED else value for column, value in enumerate(values)]
            for row, values in enumerate(self.truth)
        ]
        self.text = f"Fill the board.\n{self.board()}\n"

    def board(self) -> str:
        lines = ["   C1 C2 C3   C4 C5 C6   C7 C8 C9"]
        for row, values in enumerate(self.grid):
            cells = [str(value or ".") for value in values]
            lines.append(f"R{row + 1} " + " | ".join("  ".join(cells[at : at + 3]) for at in (0, 3, 6)))
        return "\n".join(lines)

    def step(self, move: str) -> tuple[float, bool]:
        row, column, number = map(int, move.strip("[]").split())
        if self.grid[row - 1][column - 1] or self.truth[row - 1][column - 1] != number:
            self.text += "You attempted an invalid move. Please resubmit.\n"
            return 0.0, False
        self.grid[row - 1][column - 1] = number
        self.text += f"Placed.\n{self.board()}\n"
        done = all(all(values) for values in self.grid)
        return float(done), done


class Wordle:
    """Pays the share of letters in their places."""

    def __init__(self) -> None:
        self.text = "Guess a word of five letters.\n"

    def step(self, move: str) -> tuple[float, bool]:
        guess = move.strip("[]")
        if len(guess) != len(WORD):
            self.text += "You attempted an invalid move.\n"
            return 0.5, False
        greens = sum(mine == its for mine, its in zip(guess, WORD, strict=True))
        self.text += f"{guess}: {greens} right\n"
        return greens / len(WORD), greens == len(WORD)


class TextGame:
    """Has the surface of openenv's client for TextArena."""

    def __init__(self, base_url: str):
        self.kind = Wordle if "wordle" in base_url else Sudoku

    def reset(self) -> Any:
        self.game = self.kind()
        return self.told(0.0, False)

    def step(self, action: Any) -> Any:
        return self.told(*self.game.step(action.message))

    def told(self, reward: float, done: bool) -> Any:
        observation = SimpleNamespace(messages=[SimpleNamespace(content=self.game.text)])
        return SimpleNamespace(observation=observation, reward=reward, done=done)

    def close(self) -> None: ...


class Catch:
    """Has the surface of openenv's client for OpenSpiel: a ball falls in column 1 of 5, the paddle begins in 2."""

    def __init__(self, base_url: str): ...

    def reset(self) -> Any:
        self.ball, self.paddle = 0, 2
        return self.told()

    def step(self, action: Any) -> Any:
        self.ball += 1
        self.paddle = min(COLUMNS - 1, max(0, self.paddle + action.action_id - 1))
        return self.told()

    def told(self) -> Any:
        cells = [0.0] * (ROWS * COLUMNS)
        cells[self.ball * COLUMNS + 1] = cells[(ROWS - 1) * COLUMNS + self.paddle] = 1.0
        done = self.ball == ROWS - 1
        reward = (1.0 if self.paddle == 1 else -1.0) if done else None
        return SimpleNamespace(observation=SimpleNamespace(info_state=cells, done=done), reward=reward, done=done)

    def close(self) -> None: ...


def install(patch: pytest.MonkeyPatch) -> None:
    """Has the scripts import these games in place of clients of servers."""
    actions = {"OpenSpielAction": SimpleNamespace, "TextArenaAction": SimpleNamespace, "LocalDockerProvider": None}
    found = {"OpenSpielEnv": Catch, "TextArenaEnv": TextGame, **actions}
    for name in ("openspiel_env", "openspiel_env.models", "textarena_env", "openenv", "openenv.core",
                 "openenv.core.containers", "openenv.core.containers.runtime", "requests"):  # fmt: skip
        module = ModuleType(name)
        module.__dict__.update(found, __path__=[])
        patch.setitem(sys.modules, name, module)
