"""Environments of verifiers: `verifiers:ENV_ID`, the module of an installed environment.

v0 (`load_environment`, in verifiers before 0.4): SingleTurnEnv, ToolEnv, MultiTurnEnv and what derives from them. Their
own `rollout` runs in an event loop beside, and the policy answers where it asks a client: stop conditions, tools, state
and rubric are all verifiers' own. Refused: rewards over a whole group, and environments that rewrite the conversation.
v1 (tasksets): see verifiers_tasks.py.

The environment has data of its own. A row with a column `example_id` names an example, otherwise the seed chooses one.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

from paddock.environments.beside import awaited, loop_beside
from paddock.environments.environment import Answer, Ended, Environment, Message, Messages, Turn
from paddock.environments.packages import imported, refused
from paddock.environments.tools import Tool
from paddock.environments.verifiers_tasks import tasks_source

OLD = "'verifiers>=0.1.14,<0.4'"


class Verifiers(Environment):
    """Runs one rollout of a v0 environment, with the policy as its client."""

    def __init__(self, name: str, environment: Any):
        self.name, self.environment = name, environment
        limit = getattr(environment, "max_turns", -1)
        self.max_turns = limit if limit > 0 else None  # type: ignore[misc]  # one class has many environments
        self.rollout: asyncio.Task[Any] | None = None
        self.asked: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.answered: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: list[Message] = []
        self.turns = self.steps = 0
        """Answers that the rollout has been given, and those that `step` has seen: some calls cannot be read."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        data = self.environment.get_dataset()
        chosen = row.get("example_id")
        example = data[int(seed % len(data) if chosen is None else chosen)]
        said = awaited(self._begin(example))
        if said is None:
            raise refused(self.name, "the rollout ended before the policy's first turn", "look into its log")
        return said

    def step(self, answer: Answer) -> Turn:
        self.steps += 1
        if answer.malformed and not answer.calls:
            return Turn(list(answer.results))  # told, and goes on: verifiers would see a turn without calls
        said = awaited(self._go_on(response(answer)))
        malformed = list(answer.results)[len(answer.calls) :]
        return Turn(done=True) if said is None else Turn(said + malformed)

    def reward(self, episode: Ended) -> float:
        return float(awaited(self._score(episode)))

    def close(self) -> None:
        if self.rollout is not None and not self.rollout.done():
            loop_beside().call_soon_threadsafe(self.rollout.cancel)

    def tools(self) -> Sequence[Tool]:
        """Returns the environment's tools. It runs them itself, in `step`, so nothing happens when they are called."""
        found = self.environment.tool_defs or []
        return [Tool(one.name, one.description, dict(one.parameters), runs_later) for one in found]

    async def _begin(self, example: Mapping[str, Any]) -> list[Message] | None:
        client = client_class()(self.asked, self.answered)
        self.rollout = asyncio.ensure_future(self.environment.rollout(example, client, "policy", {}))
        return await self._asks()

    async def _go_on(self, said: Any) -> list[Message] | None:
        self.turns += 1
        self.answered.put_nowait(said)
        return await self._asks()

    async def _asks(self) -> list[Message] | None:
        """Returns what is new in the next prompt of the rollout; None if the rollout is over."""
        assert self.rollout is not None
        waiting = asyncio.ensure_future(self.asked.get())
        await asyncio.wait([waiting, self.rollout], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self.rollout.result()
            return None
        prompt, known = waiting.result(), len(self.heard)
        if prompt[:known] != self.heard:
            fix = "an environment that only adds messages"
            raise refused(self.name, "rewrites the conversation, and tokens that were drawn cannot be changed", fix)
        self.heard = prompt
        return prompt[known + bool(self.turns) :]

    async def _score(self, episode: Ended) -> float:
        """Returns the rubric's reward. A rollout that was cut at a limit is ended first, as one too long is."""
        assert self.rollout is not None
        errors = imported("verifiers", OLD, self.name)
        if not self.rollout.done() and self.steps < len(episode.answers):
            await self._go_on(response(episode.answers[-1]))
        if not self.rollout.done():
            self.answered.put_nowait(errors.OverlongPromptError())
        state = await self.rollout
        await self.environment.rubric.score_rollout(state)
        await self.environment.rubric.cleanup(state)
        return state["reward"]


@cache
def client_class() -> type[Any]:
    """Returns a client of verifiers that asks the policy: prompts go into one queue, responses come from another."""
    verifiers = imported("verifiers", OLD, "verifiers")

    class Policy(verifiers.Client):  # type: ignore[name-defined]
        def __init__(self, asked: asyncio.Queue[Any], answered: asyncio.Queue[Any]):
            super().__init__(None)
            self.asked, self.answered = asked, answered

        async def get_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            self.asked.put_nowait([plain(message) for message in prompt])
            said = await self.answered.get()
            if isinstance(said, Exception):
                raise said
            return said

        def setup_client(self, config: Any) -> Any: ...
        async def to_native_tool(self, tool: Any) -> Any: ...
        async def to_native_prompt(self, messages: Any) -> Any: ...
        async def get_native_response(self, *_: Any, **__: Any) -> Any: ...
        async def raise_from_native_response(self, response: Any) -> None: ...
        async def from_native_response(self, response: Any) -> Any: ...
        async def close(self) -> None: ...

    return Policy


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


def runs_later(**_: Any) -> str:
    return ""


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes rollouts of an environment; `kwargs` go to its `load_environment` or its config."""
    full = f"verifiers:{name}"
    verifiers = imported("verifiers", "verifiers", full)
    has_old = hasattr(verifiers, "load_environment") and hasattr(verifiers, "Client")
    old = refused(full, f"verifiers {verifiers.__version__} cannot run environments of v0", f"pip install {OLD}")
    try:
        module = module_of(name, full)
    except (AttributeError, ImportError) as error:  # names of v0 that newer versions lack
        raise error if has_old else old from error
    if not hasattr(module, "load_environment"):
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
