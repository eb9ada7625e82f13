"""Environments of verifiers: `verifiers:ENV_ID`, the module of an installed environment.

v0 (`load_environment`, in verifiers before 0.4): SingleTurnEnv, ToolEnv, MultiTurnEnv and what derives from them. Their
own `rollout` runs in an event loop beside, and the policy answers where it asks a client: stop conditions, tools, state
and rubric are all verifiers' own. Refused: rewards over a whole group, and environments that rewrite the conversation.
v1 (tasksets): see verifiers_tasks.py.

An environment of v0 has data of its own. A row with a column `example_id` names an example, otherwise the seed chooses.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

from paddock.core.background import awaited
from paddock.environments.adapters.driven import Driven, runs_later
from paddock.environments.adapters.verifiers_tasks import NEW, tasks_source
from paddock.environments.environment import Answer, Ended, Environment, Message, Messages
from paddock.environments.packages import imported, refused
from paddock.environments.tools import Tool

OLD = "'verifiers>=0.1.14,<0.4'"


class Verifiers(Driven):
    """Runs one rollout of a v0 environment, with the policy as its client."""

    def __init__(self, name: str, environment: Any):
        super().__init__(name)
        self.environment = environment
        limit = getattr(environment, "max_turns", -1)
        self.max_turns = limit if limit > 0 else None  # type: ignore[misc]  # one class has many environments

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        data = self.environment.get_dataset()
        chosen = row.get("example_id")
        example = data[int(seed % len(data) if chosen is None else chosen)]
        return self.begin(self.environment.rollout(example, client_class()(self.answer), "policy", {}))

    def reward(self, episode: Ended) -> float:
        return float(awaited(self._score(episode)))

    def tools(self) -> Sequence[Tool]:
        found = self.environment.tool_defs or []
        return [Tool(one.name, one.description, dict(one.parameters), runs_later) for one in found]

    async def _score(self, episode: Ended) -> float:
        """Returns the rubric's reward."""
        state = await self.outcome(episode)
        await self.environment.rubric.score_rollout(state)
        await self.environment.rubric.cleanup(state)
        return state["reward"]


@cache
def client_class() -> type[Any]:
    """Returns a client of verifiers that asks the policy."""
    verifiers = imported("verifiers", OLD, "verifiers")

    class ClientPolicy(verifiers.Client):  # type: ignore[name-defined]
        def __init__(self, policy: Callable[[list[Message]], Awaitable[Answer | None]]):
            super().__init__(None)
            self.policy = policy

        async def get_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            said = await self.policy([plain(message) for message in prompt])
            if said is None:
                raise verifiers.OverlongPromptError
            return response(said)

        def setup_client(self, config: Any) -> Any: ...
        async def to_native_tool(self, tool: Any) -> Any: ...
        async def to_native_prompt(self, messages: Any) -> Any: ...
        async def get_native_response(self, *_: Any, **__: Any) -> Any: ...
        async def raise_from_native_response(self, response: Any) -> None: ...
        async def from_native_response(self, response: Any) -> Any: ...
        async def close(self) -> None: ...

    return ClientPolicy


def plain(message: Any) -> Message:
    """Returns a message of verifiers as a mapping; calls are written as chat templates take them."""
    found: Message = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    calls = [
        {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
        for one in found.get("tool_calls", ())
    ]
    return {**found, "tool_calls": calls} if calls else found


def response(answer: Answer) -> Any:
    """Returns a turn of the policy as a response of verifiers."""
    types = imported("verifiers.types", OLD, "verifiers")
    calls = [
        types.ToolCall(
            id=call.id or f"call_{answer.number}_{index}", name=call.name, arguments=json.dumps(call.arguments)
        )
        for index, call in enumerate(answer.calls)
    ]
    reason = "length" if not answer.stopped else "tool_calls" if calls else "stop"
    message = types.ResponseMessage(
        content=answer.text, tool_calls=calls or None, finish_reason=reason, is_truncated=not answer.stopped
    )
    return types.Response(id=f"turn_{answer.number}", created=int(time.time()), model="policy", message=message)


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes rollouts of an environment; `kwargs` go to its `load_environment` or its config."""
    full = f"verifiers:{name}"
    verifiers = imported("verifiers", "verifiers", full)
    has_old = hasattr(verifiers, "load_environment") and hasattr(verifiers, "Client")
    old = refused(full, f"verifiers {verifiers.__version__} cannot run environments of v0", f"pip install {OLD}")
    try:
        module = module_of(name, full)
    except (AttributeError, ImportError) as error:  # names of v0 that newer versions lack
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "verifiers":
            raise refused(full, f"needs the module {error.name}, which is not installed", "install it") from error
        raise error if has_old else old from error
    if not hasattr(module, "load_environment"):
        if has_old:
            raise refused(full, f"verifiers {verifiers.__version__} cannot run tasksets", f"pip install {NEW}")
        return tasks_source(name, kwargs)
    if not has_old:
        raise old
    environment = verifiers.load_environment(name, **kwargs)
    if not isinstance(environment, verifiers.MultiTurnEnv):
        raise refused(full, f"is a {type(environment).__name__}, not a MultiTurnEnv", "one that derives from it")
    if getattr(environment, "requires_group_rollouts", False):
        fix = "an environment whose reward functions score one rollout"
        raise refused(full, "has rewards over a whole group, and an episode is scored alone", fix)
    return partial(Verifiers, full, environment)


def module_of(name: str, full: str) -> ModuleType:
    """Returns the module of an installed environment; `owner/name@version` is that of `name`."""
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    for place in (f"verifiers.v1.tasksets.{module}", module) if module else ():
        try:
            found = importlib.util.find_spec(place)
        except ModuleNotFoundError:  # a version without tasksets
            continue
        if found is not None:
            return importlib.import_module(place)
    raise refused(full, f"there is no module {module!r}", "install the package of the environment")
