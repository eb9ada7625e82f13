"""Tools, interactions and agent loops in verl's form: `rollouts.environments` imports this module by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from paddock.config.conversations import TOOLS
from paddock.config.roles import RolloutConfig
from paddock.environments.catalogue import Factory
from paddock.environments.tools import Tool
from paddock.verl.agent_loop import LoopConversation
from paddock.verl.loop_factory import LOOPS, LoopFactory, listed_loops, loop_arguments, no_environment
from paddock.verl.tools import VerlEnvironment, VerlTool, load_interactions, load_verl_tools, needs_verl


class VerlConversations:
    """Makes the factories of a config's conversations that are in verl's form."""

    def __init__(self, rollout: RolloutConfig, settings: Any):
        """`settings`: the dataclass with every key of the run, which agent loops are given as it is."""
        self.rollout, self.settings = rollout, settings

    def tools(self) -> list[VerlTool]:
        """Returns the tools of the config's YAML file."""
        path = self.rollout.multi_turn.tool_config_path
        return load_verl_tools(path) if path else []

    def with_tools(self, tools: Sequence[Tool]) -> Factory | None:
        """Returns the factory of environments for tools and interactions; None if neither is in verl's form."""
        path = self.rollout.multi_turn.interaction_config_path
        interactions = load_interactions(path) if path else {}
        if not interactions and not needs_verl(tools):
            return None
        return Factory(TOOLS, lambda: VerlEnvironment(tools, interactions), tools, None, inline=True)

    def loop(self, name: str, tools: Callable[[], Sequence[Tool]]) -> Factory | None:
        """Returns the factory of an agent loop of the config's file, or of one that a module registered."""
        kind, own = self.listed.get(name) or (LOOPS.get(name), {})
        if kind is None:
            return None
        arguments = {**loop_arguments(asdict(self.settings), self.rollout.multi_turn, tools()), **own}
        play = {"loop": kind, "arguments": arguments, "conversation": LoopConversation}
        return LoopFactory(name, no_environment, (), None, inline=True, **play)

    def loop_names(self) -> list[str]:
        return [*LOOPS, *self.listed]

    @cached_property
    def listed(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        path = self.rollout.agent.agent_loop_config_path
        return listed_loops(path) if path else {}
