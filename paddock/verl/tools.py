"""Tools and interactions in verl's form, as an environment: tools are run, and an interaction answers other turns.

One object of a class serves all episodes; an episode is an instance of it, by an id: `create` before the first call,
`execute` for each, `calc_reward` and `release` at the end. verl before 0.6 did so; later versions create and release
around every call, which leaves nothing to remember between two calls.

The reward that `execute` returns, and the score of an interaction, are not paid, as in verl: the reward function is
told of them, in `extra_info` as `tool_rewards`, `turn_scores` and `rollout_reward_scores` (what `calc_reward` returns).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType, SimpleNamespace
from typing import Any
from uuid import uuid4

from paddock.core.registry import suggest
from paddock.environments.environment import Answer, Ended, Environment, Message, Messages, Turn, messages_said
from paddock.environments.tools import MARK, SCHEMA, Schema, Tool, ToolError, written
from paddock.errors import UserError
from paddock.rewards.functions import finished
from paddock.verl.classes import MULTI_TURN, Entry, class_of, entries, made, require_known, settled, taken

log = logging.getLogger(__name__)

TOOLS, INTERACTIONS = f"{MULTI_TURN}.tool_config_path", f"{MULTI_TURN}.interaction_config_path"
TRIPLE = "__verl_function_tool__"
"""Marks a function that may return a reward and metrics behind its response."""
NATIVE = "native"
SCHEMAS = "verl.tools.schemas.OpenAIFunctionToolSchema"


@dataclass(frozen=True)
class VerlTool(Tool):
    """Holds a tool of a class: the policy is told its own schema, and it checks its arguments itself."""

    own: Any = None

    def schema(self) -> Schema:
        return schema_of(self.own)

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return dict(given)


def schema_of(own: Any) -> Schema:
    """Returns the schema of a tool of a class as chat templates take it."""
    schema = own.tool_schema
    return dict(schema) if isinstance(schema, Mapping) else schema.model_dump(exclude_unset=True, exclude_none=True)


def load_verl_tools(path: str) -> list[VerlTool]:
    """Returns the tools of a YAML file: `tools: [{class_name, config, tool_schema}]`."""
    tools = []
    for entry in tool_entries(path):
        name, config = entry["class_name"], entry["config"]
        tool_class, schema = class_of(name, TOOLS, path), entry.get("tool_schema")
        if schema:
            schema = made(class_of(SCHEMAS, TOOLS, path).model_validate, "tool_schema", TOOLS, path, {"obj": schema})
        own = made(tool_class, name, TOOLS, path, {"config": config, "tool_schema": schema})
        function = schema_of(own)["function"]
        about = str(function.get("description", "")), dict(function.get("parameters") or {})
        tools.append(VerlTool(str(function["name"]), *about, own.execute, own))
    return tools


def tool_entries(path: str) -> list[Entry]:
    """Returns the entries of a YAML file of tools; refuses what no run takes, and imports no class."""
    listed = entries(path, TOOLS, "tools", "class_name")
    for entry in listed:
        name, config = entry["class_name"], dict(entry.get("config") or {})
        kind = config.setdefault("type", NATIVE)
        if kind != NATIVE:
            reason = f"{name} is of type {kind}, and no server of tools is started here"
            if kind == "mcp":
                reason = f"{name} is a tool of an MCP server, and none is started here (nor by verl, from 0.8 on)"
            fix = f"write a class with `type: {NATIVE}` or a function ({MULTI_TURN}.function_tool_path) that calls it"
            raise UserError(reason, key=TOOLS, value=path, fix=fix)
        require_known(name, TOOLS, path)
        entry["config"] = config
    return listed


def interaction_entries(path: str) -> list[Entry]:
    """Returns the entries of a YAML file of interactions; refuses what no run takes, and imports no class."""
    listed = entries(path, INTERACTIONS, "interaction", "class_name")
    for entry in listed:
        require_known(entry["class_name"], INTERACTIONS, path)
    return listed


def load_interactions(path: str) -> dict[str, Any]:
    """Returns the interactions of a YAML file by name: `interaction: [{name, class_name, config}]`."""
    interactions: dict[str, Any] = {}
    for entry in interaction_entries(path):
        short = entry["class_name"].rpartition(".")[2]
        name = entry.get("name") or (short.removesuffix("Interaction") or short).lower()
        if name in interactions:
            fix = "`name:` of its own for each"
            raise UserError(f"two interactions are called {name!r}", key=INTERACTIONS, value=path, fix=fix)
        config = {**(entry.get("config") or {}), "name": name}
        kind = class_of(entry["class_name"], INTERACTIONS, path)
        interactions[name] = made(kind, entry["class_name"], INTERACTIONS, path, {"config": config})
    return interactions


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Marks a function as a tool, as `tool` does; it may return a reward and metrics behind its response.

    `schema` stands for what its types and docstring say.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, MARK, (name if isinstance(name, str) else None, None))
        setattr(function, TRIPLE, True)
        if schema is not None:
            given = schema if isinstance(schema, Mapping) else schema.model_dump(exclude_none=True)
            setattr(function, SCHEMA, given["function"])
        return function

    return mark(name) if callable(name) else mark


def needs_verl(tools: Sequence[Tool]) -> bool:
    """True if one of the tools is in verl's form."""
    return any(isinstance(tool, VerlTool) or hasattr(tool.function, TRIPLE) for tool in tools)


class VerlEnvironment(Environment):
    """Runs the tools that the policy calls, and has the row's interaction answer turns that call none."""

    def __init__(self, tools: Sequence[Tool], interactions: Mapping[str, Any]):
        self.id = uuid4().hex
        self.interactions = interactions
        self.interaction: Any = None
        self.instances: dict[str, tuple[Any, str]] = {}
        """Objects of tools that were called, and the ids of this episode there."""
        self.creating = {tool.name: asyncio.Lock() for tool in tools}
        self.told: dict[str, Any] = {"tool_rewards": [], "turn_scores": []}
        self.messages: list[Message] = []
        self.kwargs: Mapping[str, Any] = {}
        self.own: list[Tool] = [self._bound(tool) for tool in tools]

    def tools(self) -> Sequence[Tool]:
        return self.own

    async def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:  # type: ignore[override]
        self.kwargs, self.messages = row.get("tools_kwargs") or {}, messages_said(row["prompt"])
        if row.get("need_tools_kwargs") and not self.kwargs:
            log.warning("%s needs tools_kwargs and has none", place(row))
        if chosen := row.get("tool_selection"):
            self.own = [tool for tool in self.own if tool.name in chosen]
        self.agent_data = SimpleNamespace(
            messages=self.messages, tools_kwargs=self.kwargs, request_id=self.id, extra_fields=self.told
        )
        if self.interactions:
            await self._start(row)
        return None

    async def _start(self, row: Mapping[str, Any]) -> None:
        self.interaction_kwargs = dict(row.get("interaction_kwargs") or {})
        name = str(self.interaction_kwargs.get("name"))
        if name not in self.interactions:
            reason = f"{place(row)} has the interaction {name}, which the file does not have"
            fix = f'extra_info: {{"interaction_kwargs": {{"name": ...}}}}; {suggest(name, sorted(self.interactions))}'
            raise UserError(reason, key=INTERACTIONS, fix=fix)
        self.interaction = self.interactions[name]
        begin = self.interaction.start_interaction
        await settled(begin(self.id, **taken(begin, self.interaction_kwargs)))

    async def step(self, answer: Answer) -> Turn:  # type: ignore[override]
        self.messages.append({"role": "assistant", "content": answer.text})
        if answer.results:
            self.messages += answer.results
            return Turn(list(answer.results))
        if self.interaction is None or not answer.stopped:
            return Turn()
        ask = self.interaction.generate_response
        reply = await settled(ask(self.id, self.messages, **taken(ask, self.interaction_kwargs)))
        over, text, score = reply[:3]
        if score is not None:
            self.told["turn_scores"].append(score)
        message = {"role": "user", "content": str(text)}
        self.messages.append(message)
        return Turn([message], done=bool(over))

    async def reward(self, episode: Ended) -> float:  # type: ignore[override]
        """Asks the tools what the episode is worth: reward functions are told, and nothing more is paid."""
        scores: dict[str, Any] = {}
        for name, (own, instance) in self.instances.items():
            if hasattr(own, "calc_reward"):
                scores[name] = await settled(own.calc_reward(instance, **self._kwargs(name, "calc_reward", own)))
        self.told["rollout_reward_scores"] = {**scores, "user_turn_rewards": self.told["turn_scores"]}
        return 0.0

    async def close(self) -> None:  # type: ignore[override]
        try:
            for name, (own, instance) in self.instances.items():
                await settled(own.release(instance, **self._kwargs(name, "release", own)))
        finally:
            if finalize := getattr(self.interaction, "finalize_interaction", None):
                await settled(finalize(**taken(finalize, {"instance_id": self.id})))

    # Calls

    def _bound(self, tool: Tool) -> Tool:
        """Returns a tool whose function belongs to this episode. A coroutine function stays one; calls of others come
        one after the other, in a thread."""
        if not isinstance(tool, VerlTool) and not hasattr(tool.function, TRIPLE):
            return tool
        runs = tool.own.execute if isinstance(tool, VerlTool) else tool.function

        async def call(**arguments: Any) -> str:
            result = self._execute(tool, arguments) if isinstance(tool, VerlTool) else tool.function(**arguments)
            return self._take(tool.name, await settled(result))

        def call_here(self: VerlEnvironment, **arguments: Any) -> Any:
            return finished(call(**arguments))

        beside = inspect.iscoroutinefunction(inspect.unwrap(runs))
        return replace(tool, function=call if beside else MethodType(call_here, self))

    async def _execute(self, tool: VerlTool, arguments: dict[str, Any]) -> Any:
        own = tool.own
        async with self.creating[tool.name]:
            if tool.name not in self.instances:
                create = self._kwargs(tool.name, "create", own)
                created = await settled(own.create(self.id, **create))
                instance = created[0] if isinstance(created, tuple) else created
                self.instances[tool.name] = own, str(instance or self.id)
        instance = self.instances[tool.name][1]
        return await settled(own.execute(instance, arguments, **self._kwargs(tool.name, "execute", own)))

    def _kwargs(self, name: str, method: str, own: Any) -> dict[str, Any]:
        """Returns what the row gives a method of a tool, as arguments. Tools of newer versions find those of `create`
        under `create_kwargs`, and all that is known of the episode as `agent_data`."""
        given = dict((self.kwargs.get(name) or {}).get(f"{method}_kwargs") or {})
        if method == "create":
            given["create_kwargs"] = dict(given)
        elif method == "execute":
            given["agent_data"] = self.agent_data
        return taken(getattr(own, method), given)

    def _take(self, name: str, result: Any) -> str:
        """Notes the reward of a call; returns its response as a text."""
        response, reward = result, None
        if isinstance(result, tuple):
            if not 1 <= len(result) <= 3:
                raise ToolError(f"{name} returned {len(result)} values, not a response, a reward and metrics")
            response, reward, *_ = (*result, None)
        if reward is not None:
            self.told["tool_rewards"].append(reward)
        if getattr(response, "image", None) or getattr(response, "video", None):
            raise UserError(f"the tool {name} returned an image or a video, and what tools return is read as text here",
                            key=TOOLS, fix="return ToolResponse(text=...)")  # fmt: skip
        return written(response.text or "") if hasattr(response, "text") else written(response)


def place(row: Mapping[str, Any]) -> str:
    return f"row {row.get('index')} of data_source {row.get('data_source')}"
