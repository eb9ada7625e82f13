"""Three OpenEnv servers in one process: the environment that `openenv init` writes, one of MCP tools, and a board.

python openenv_servers.py FOLDER PORT PORT PORT      FOLDER holds demo_env, as `openenv init demo_env` left it
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Counter(MCPEnvironment):
    """Counts to a target with one tool; the call that reaches it pays 1 and ends the episode."""

    def __init__(self) -> None:
        server = FastMCP("counter")
        self.count, self.target = 0, 3

        @server.tool
        def add(amount: int) -> int:
            """Adds to the counter."""
            self.count += amount
            return self.count

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, target: int = 3) -> Observation:
        self.count, self.target = 0, target
        return Observation(metadata={"message": f"Count to {target}."})

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        said = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            said.done, said.reward = self.count >= self.target, float(self.count == self.target)
        return said

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("this environment has tools only")

    @property
    def state(self) -> State:
        return State(step_count=self.count)


class Move(Action):
    to: str


class Board(Observation):
    phase: str = "initial"
    cells: list[int] = Field(default_factory=list)
    legal: list[int] = Field(default_factory=list)
    last: int | None = None


class Cells(Environment[Move, Board, State]):
    """Marks cells; what can be played is in a list, beside a text that says little, as in OpenSpiel's games."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        self.cells = [0, 0]
        return Board(cells=self.cells, legal=[0, 1])

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Board:
        self.cells[int(action.to)] = 1
        legal = [place for place, mark in enumerate(self.cells) if not mark]
        return Board(phase="playing", cells=self.cells, legal=legal, last=int(action.to), done=not legal, reward=1.0)

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    folder, *ports = sys.argv[1:]
    sys.path.insert(0, folder)
    from demo_env.server.app import app

    tools = create_app(Counter, CallToolAction, CallToolObservation, env_name="counter", max_concurrent_envs=1)
    board = create_app(Cells, Move, Board, env_name="cells")
    for other, port in zip((tools, board), ports[1:], strict=True):
        how = {"host": "127.0.0.1", "port": int(port), "log_level": "error"}
        threading.Thread(target=uvicorn.run, args=(other,), kwargs=how, daemon=True).start()
    uvicorn.run(app, host="127.0.0.1", port=int(ports[0]), log_level="error")


if __name__ == "__main__":
    main()
