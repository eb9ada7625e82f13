"""Which runs hold conversations of several turns, and with what: read by the driver, by ranks and by plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paddock.config.paths import files_of as files_of
from paddock.config.roles import AgentConfig, MultiTurnConfig, RolloutConfig

SINGLE, TOOLS = "single_turn_agent", "tool_agent"
"""Agent loops that are always there: one turn, and turns with tools."""


def converses(rollout: RolloutConfig, environment: Any) -> bool:
    """True if the run has an environment, tools, or an agent loop of several turns."""
    return bool(environment) or rollout.multi_turn.enable or rollout.agent.default_agent_loop != SINGLE


def environments_named(environment: Any) -> dict[str | None, str]:
    """Returns the run's environments by the names that rows give; under None the environment of all rows."""
    if isinstance(environment, dict):
        return {str(name): str(address) for name, address in environment.items()}
    return {} if environment is None else {None: str(environment)}


def has_agent_loops(agent: AgentConfig) -> bool:
    """True if rows may be answered by agent loops of the user's."""
    return agent.agent_loop_config_path is not None or agent.default_agent_loop not in (SINGLE, TOOLS)


def with_verl_limits(limits: MultiTurnConfig) -> MultiTurnConfig:
    """Returns the limits with verl's number of calls and length of results in place of those that are unset."""
    calls, length = limits.max_parallel_calls or 1, limits.max_tool_response_length or 256
    return replace(limits, max_parallel_calls=calls, max_tool_response_length=length)


_TURNS = "actor_rollout_ref.rollout.multi_turn"


def files_named(rollout: RolloutConfig, environment: Any) -> list[tuple[str, str, str]]:
    """Returns key, value and file of each Python or YAML file that environments, tools and agent loops are in."""
    named = {
        "environment": list(environments_named(environment).values()),
        f"{_TURNS}.function_tool_path": rollout.multi_turn.function_tool_path,
        f"{_TURNS}.tool_config_path": rollout.multi_turn.tool_config_path,
        f"{_TURNS}.interaction_config_path": rollout.multi_turn.interaction_config_path,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": rollout.agent.agent_loop_config_path,
    }
    files = [(key, path, path.partition(".py:")[0] + ".py" if ".py:" in path else path)
             for key, value in named.items() for path in files_of(value)]  # fmt: skip
    return [one for one in files if one[2].endswith((".py", ".yaml", ".yml", ".json"))]
