"""Tasksets of verifiers v1, with their own environments, tools, runtimes and rewards.

verifiers runs the episode (`Env.run_episode`), and the policy is the model of one agent: see verifiers_policy.py. Tasks
run in the subprocess runtime if nothing else is set, and agents without a program of their own in a chat loop without
tools but the task's. `environment_kwargs` are keys of the environment's config (`agent: {max_turns: 3}`), the others
keys of the taskset's. Refused: several agents without a model of their own, several conversations in one, images.

An infinite taskset has its first `ENOUGH` tasks. A row with a column `example_id` names a task by its place, otherwise
the seed chooses one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from paddock.core.background import awaited
from paddock.environments.adapters.driven import Driven, runs_later
from paddock.environments.adapters.verifiers_policy import endpoint, register
from paddock.environments.environment import Answer, Ended, Environment, Message, Messages
from paddock.environments.packages import imported, refused
from paddock.environments.tools import Tool

log = logging.getLogger(__name__)
ENOUGH = 1000
BY_POLICY = ("EnvError", "TaskError")
"""Errors of a taskset's own code: what the policy wrote may cause them, so they do not stop the run."""
NEW = "'verifiers>=0.4'"
SERVING: list[Any] = []
"""Tool servers and interception servers of this process. verifiers stops them when the program ends."""
ALONE = "a config with one conversation: keys of the environment go into environment_kwargs"
OTHER = "for each other agent environment_kwargs={AGENT: {model: NAME, client: {type: eval, base_url: URL}}}"


@dataclass
class Stage:
    """Holds a taskset and its environment, which many episodes share."""

    name: str
    environment: Any
    tasks: Sequence[Any]
    agent: str
    """The agent that the policy plays."""
    url: str
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools of the first request; None before it."""


class TaskEpisode(Driven):
    """Plays one task."""

    def __init__(self, stage: Stage):
        super().__init__(stage.name)
        self.stage = stage
        self.max_turns = getattr(stage.environment.config, stage.agent).max_turns  # type: ignore[misc]
        self.traces: list[Any] = []
        """Conversations of the policy, as verifiers records them."""
        self.wrote = ""

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        tasks, chosen = self.stage.tasks, row.get("example_id")
        return self.begin(self._run(tasks[int(seed % len(tasks) if chosen is None else chosen)]))

    def tools(self) -> Sequence[Tool]:
        """Returns the tools of the first task's first request. This opens its runtime and its tool servers once."""
        if self.stage.tools is None:
            first = TaskEpisode(self.stage)
            try:
                first.reset({"example_id": 0}, 0)
            finally:
                first.close()
        return [
            Tool(one["name"], one.get("description", ""), one["parameters"], runs_later)
            for one in (tool["function"] for tool in self.stage.tools or ())
        ]

    def reward(self, episode: Ended) -> float:
        awaited(self.outcome(episode))
        return float(self.traces[0].reward) if self.traces[0].ok else 0.0

    async def _run(self, task: Any) -> None:
        """Runs the episode; raises what verifiers noted as its error."""
        stack, open_to = imported("verifiers.v1", "verifiers", self.name), endpoint().episodes
        model = f"episode-{id(self)}"
        client = stack.EvalClientConfig(base_url=self.stage.url, api_key_var="PADDOCK_NO_KEY")
        context = imported("verifiers.v1.clients", "verifiers", self.name).ModelContext(model, client)
        open_to[model] = self._asked
        try:
            ended = await self.stage.environment.run_episode(task, context, on_trace=self._began)
        finally:
            del open_to[model]
        self._blame([error for one in (*self.traces, ended) for error in one.errors if not ended.ok])

    def _blame(self, errors: Sequence[Any]) -> None:
        """Refuses the taskset for an error of its episode; only warns if what the policy wrote may be the cause."""
        if errors and self.turns and errors[0].type in BY_POLICY:
            warn_of(self.name, f"{errors[0].type}: {errors[0].message:.300}")
        elif errors:
            reason = f"verifiers ended the episode with {errors[0].type}: {errors[0].message}"
            raise refused(self.name, reason, "mend the task or what it needs; verifiers' log has the traceback")

    def _began(self, trace: Any) -> None:
        if trace.agent.name == self.stage.agent:
            self.traces.append(trace)

    async def _asked(self, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> Answer | None:
        """Returns the policy's turn, for the endpoint. What cannot be trained on is refused."""
        self.stage.tools = tools if self.stage.tools is None else self.stage.tools
        prompt = [plain(message) for message in messages]
        said = prompt[len(self.heard) : len(self.heard) + bool(self.turns)]
        if len(self.traces) > 1:
            self.refuse("the policy has several conversations in an episode, and one is trained", ALONE)
        elif any(not isinstance(message["content"], str) for message in prompt):
            self.refuse("shows the policy more than text", "a taskset without images")
        elif said and said[0]["content"] != self.wrote:
            self.refuse("rewrites what the policy wrote, and drawn tokens cannot be changed", "one that does not")
        elif tools != self.stage.tools:
            self.refuse("offers other tools than in its first request", "a taskset whose tasks have the same tools")
        answer = await self.answer(prompt)
        self.wrote = answer.text if answer else ""
        return answer


@cache
def warn_of(name: str, error: str) -> None:
    log.warning("%s: verifiers ended an episode with %s; it pays nothing", name, error)


def plain(message: Message) -> Message:
    """Returns a message of a chat request as templates take it; text parts are joined, and other parts stay."""
    found = {key: value for key, value in message.items() if key in ("role", "tool_calls", "tool_call_id") and value}
    content = message.get("content") or ""
    if not isinstance(content, str) and all(part.get("type") == "text" for part in content):
        content = "\n".join(part["text"] for part in content)
    return {**found, "content": content}


def tasks_source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that plays tasks of a taskset; `kwargs` are keys of its environment's config or of its own."""
    full = f"verifiers:{name}"
    stack = imported("verifiers.v1", NEW, full)
    loaders = imported("verifiers.v1.utils.loaders", NEW, full)
    try:
        loaders.taskset_class(name)
    except (AttributeError, TypeError) as error:
        raise refused(full, f"is neither an environment nor a taskset: {error}", "a module that exports one") from error
    kind = loaders.env_config_type(name)
    environment = loaders.load_environment(kind.model_validate(settings(stack, loaders, name, kind, kwargs)))
    agents = [agent for agent in agents_of(stack, kind) if getattr(environment.config, agent).client is None]
    if len(agents) != 1:
        named = ", ".join(agents)
        raise refused(full, f"the policy would play {len(agents)} agents ({named}), and one is trained", OTHER)
    found = environment.taskset
    tasks = list(itertools.islice(found, ENOUGH) if found.INFINITE else found)
    if not tasks:
        raise refused(full, "has no tasks", "a taskset whose load() yields some")
    return partial(TaskEpisode, Stage(full, environment, tasks, agents[0], awaited(serve(environment))))


def agents_of(stack: Any, kind: Any) -> list[str]:
    """Returns the names of an environment's agents: keys of its config whose default is an agent's config."""
    return [name for name, key in kind.model_fields.items() if isinstance(key.default, stack.AgentConfig)]


def settings(stack: Any, loaders: Any, name: str, kind: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a taskset's environment: what is given, and how agents run here."""
    own = {key: value for key, value in kwargs.items() if key in kind.model_fields and key != "id"}
    given = {key: value for key, value in kwargs.items() if key not in own} | dict(own.pop("taskset", {}))
    here: dict[str, Any] = {}
    for agent in agents_of(stack, kind):
        default = kind.model_fields[agent].default
        harness = default.harness.id if default.harness else loaders.default_harness_id(name)
        here[agent] = {"harness": {"id": register()}} if harness in ("bash", "null") else {}
        if default.runtime.type == "prime":
            here[agent]["runtime"] = {"type": "subprocess"}
        here[agent] |= own.pop(agent, {})
    return {**own, **here, "taskset": {**given, "id": name}}


async def serve(environment: Any) -> str:
    """Opens what the episodes of an environment share, until the program ends; returns the policy's endpoint."""
    SERVING.append(environment.serving())
    await SERVING[-1].__aenter__()
    return await endpoint().start()
