"""Which runs hold conversations of several turns, and with what: read by the driver, by ranks and by plans."""

from __future__ import annotations

from paddock.config.schema import Config

SINGLE, TOOLS = "single_turn_agent", "tool_agent"
"""Agent loops that are always there: one turn, and turns with tools."""


def converses(config: Config) -> bool:
    """True if the config names an environment, tools, or an agent loop of several turns."""
    rollout = config.actor_rollout_ref.rollout
    return bool(config.environment) or rollout.multi_turn.enable or rollout.agent.default_agent_loop != SINGLE


def has_agent_loops(config: Config) -> bool:
    """True if rows may be answered by agent loops of the user's."""
    agent = config.actor_rollout_ref.rollout.agent
    return agent.agent_loop_config_path is not None or agent.default_agent_loop not in (SINGLE, TOOLS)


def paths_of(value: object) -> list[str]:
    """Returns the files that a key names: one, a list, or none."""
    return [] if value is None else [value] if isinstance(value, str) else [str(path) for path in value]  # type: ignore[attr-defined]
