"""Two OpenEnv servers in one process: the environment that `openenv init` writes, and one of MCP tools.

python openenv_servers.py FOLDER PORT PORT      FOLDER holds demo_env, as `openenv init demo_env` left it
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


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


def main() -> None:
    folder, *ports = sys.argv[1:]
    sys.path.insert(0, folder)
    from demo_env.server.app import app

    tools = create_app(Counter, CallToolAction, CallToolObservation, env_name="counter", max_concurrent_envs=1)
    how = {"host": "127.0.0.1", "port": int(ports[1]), "log_level": "error"}
    threading.Thread(target=uvicorn.run, args=(tools,), kwargs=how, daemon=True).start()
    uvicorn.run(app, host="127.0.0.1", port=int(ports[0]), log_level="error")


if __name__ == "__main__":
    main()
