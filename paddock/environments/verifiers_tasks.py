"""Tasksets of verifiers v1: a task's prompt, one turn of the policy, and the task's own rewards.

Refused, since they need verifiers' harness, which runs a program against a server: tasksets with an environment class
or toolsets of their own, tasks that need a container, and rewards and hooks that take a `runtime`. An infinite taskset
has its first `ENOUGH` tasks. A row with a column `example_id` names a task by its place, else the seed chooses one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddock.environments.beside import awaited
from paddock.environments.environment import Answer, Environment, Message, Messages, Turn, messages_said
from paddock.environments.packages import imported, refused

ENOUGH = 1000


class Task(Environment):
    """Asks one task of a taskset."""

    max_turns = 1

    def __init__(self, name: str, tasks: Sequence[Any]):
        self.name, self.tasks = name, tasks

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        chosen = row.get("example_id")
        self.task = self.tasks[int(seed % len(self.tasks) if chosen is None else chosen)]
        data = self.task.data
        if data.prompt is None:
            raise refused(self.name, "its task has no prompt: a user opens the conversation", "a task with a prompt")
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        given = (
            data.prompt if isinstance(data.prompt, str) else [one.model_dump(exclude_none=True) for one in data.prompt]
        )
        self.asked: list[Message] = system + messages_said(given)
        return self.asked

    def step(self, answer: Answer) -> Turn:
        trace = trace_of(self.task, self.asked, answer.text)
        awaited(self.task.score(trace))
        return Turn(reward=float(trace.reward), done=True)


def trace_of(task: Any, asked: Sequence[Message], text: str) -> Any:
    """Returns the trace that the task's rewards read: the prompt's messages, then the policy's."""
    stack = imported("verifiers.v1", "verifiers", "verifiers")
    state = imported("verifiers.v1.state", "verifiers", "verifiers").state_cls(type(task))()
    said: list[Message] = [*asked, {"role": "assistant", "content": text}]
    nodes = [
        stack.MessageNode.model_validate({"parent": number - 1 if number else None, "message": message})
        for number, message in enumerate(said)
    ]
    nodes[-1].sampled = True
    about = stack.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return stack.Trace(task=about, state=state, agent=stack.AgentInfo(config=stack.AgentConfig()), nodes=nodes)


def tasks_source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that asks tasks of a taskset; `kwargs` are its config."""
    full = f"verifiers:{name}"
    stack = imported("verifiers.v1", "verifiers", full)
    loaders = imported("verifiers.v1.utils.loaders", "verifiers", full)
    try:
        config = loaders.taskset_config_type(name).model_validate({**kwargs, "id": name})
    except (AttributeError, TypeError) as error:
        raise refused(full, f"is neither an environment nor a taskset: {error}", "a module that exports one") from error
    taskset = loaders.load_taskset(config)
    kind = type(taskset).task_type()
    needs = "which verifiers runs in a program against a server"
    if loaders.environment_class(name) is not stack.SingleAgentEnv:
        raise refused(full, f"has an environment of its own, {needs}", "a plain taskset")
    if kind.toolsets(config.task) or type(taskset).toolsets(config):
        raise refused(full, f"has toolsets, {needs}", "a taskset without, or methods of an environment as tools")
    hooks = [
        getattr(kind, hook) for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(stack.Task, hook)
    ]
    tasks = list(itertools.islice(taskset, ENOUGH) if taskset.INFINITE else taskset)
    if not tasks:
        raise refused(full, "has no tasks", "a taskset whose load() yields some")
    scored = [one for one in (*tasks[0].hooks("reward"), *tasks[0].hooks("metric")) if takes_runtime(one)]
    if kind.NEEDS_CONTAINER or hooks or scored:
        what = "tasks in a container" if kind.NEEDS_CONTAINER else f"{(hooks + scored)[0].__name__} over a runtime"
        raise refused(full, f"has {what}, {needs}", "a taskset whose rewards read the trace alone")
    return lambda: Task(full, tasks)


def takes_runtime(function: Callable[..., Any]) -> bool:
    taken = inspect.signature(function).parameters.get("runtime")
    return taken is not None and taken.default is taken.empty
