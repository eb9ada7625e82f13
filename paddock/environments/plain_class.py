"""Environments of TRL's contract (`environment_factory`): plain classes whose public methods are tools.

`reset(**row)` begins an episode. A text that it returns is appended to the last message of the row's prompt.
`get_reward()` scores the episode; None pays nothing. Every other public method is a tool, and needs types and a
docstring. A reward function that asks for `environments` reads the objects, as in TRL; an attribute of theirs is paid
by nobody else. Three things TRL does not do: a method `close` is called at the end and is no tool, a `reset` without
`**kwargs` is given only the columns that it names, and one that names `seed` is given the episode's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from paddock.environments.environment import Ended, Environment, Message, Messages, messages_said
from paddock.environments.packages import refused
from paddock.environments.tools import Tool, tool_of
from paddock.rewards.functions import TRUTHS

RESERVED = ("reset", "get_reward", "close")


class PlainEnvironment(Environment):
    """Runs an object of a plain class as an environment."""

    calls_limited = False

    def __init__(self, plain: Any):
        self.plain = plain
        if not callable(getattr(plain, "reset", None)):
            fix = "subclass paddock.Environment, or define reset(self, **row)"
            raise refused(type(plain).__qualname__, "has no method reset", fix)
        if inspect.iscoroutinefunction(getattr(plain, "get_reward", None)):
            self.reward = self._awaited_reward  # type: ignore[method-assign, assignment]  # where tools are awaited

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        said = self.plain.reset(**self._arguments(row, seed))
        return None if said is None else appended(row.get("prompt"), said)

    def reward(self, episode: Ended) -> float:
        return self.plain.get_reward() or 0.0 if hasattr(self.plain, "get_reward") else 0.0

    async def _awaited_reward(self, episode: Ended) -> float:
        return await self.plain.get_reward() or 0.0

    def close(self) -> None:
        if callable(close := getattr(self.plain, "close", None)):
            close()

    def tools(self) -> Sequence[Tool]:
        functions = inspect.getmembers(type(self.plain), inspect.isfunction)  # a property may need what `reset` sets
        public = [name for name, _ in functions if name not in RESERVED and not name.startswith("_")]
        return [documented(getattr(self.plain, name), self.plain) for name in public]

    def _arguments(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Returns the columns that `reset` takes, and the seed if it names that."""
        given = {**{name: row["ground_truth"] for name in TRUTHS if "ground_truth" in row}, **row}
        taken = inspect.signature(self.plain.reset).parameters
        if "seed" in taken:
            given.setdefault("seed", seed)
        named = [one for one in taken.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        needed = [one.name for one in named if one.default is one.empty]
        if missing := [name for name in needed if name not in given]:
            name = type(self.plain).__qualname__
            fix = f"add the column, or give the argument a default; the rows have {', '.join(sorted(given))}"
            raise refused(name, f"{name}.reset takes {missing[0]!r}, and the rows have no such column", fix)
        everything = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        return given if everything else {name: value for name, value in given.items() if name in taken}


def documented(method: Any, owner: Any) -> Tool:
    """Returns a method as a tool; TRL refuses one without a docstring, too."""
    if not inspect.getdoc(method):
        fix = f"write a docstring: models read it; or call the method _{method.__name__}"
        reason = f"the method {method.__name__} is public, so it is a tool, and has no docstring"
        raise refused(type(owner).__qualname__, reason, fix)
    return tool_of(method)


def appended(prompt: Messages | None, said: str | list[Any]) -> Messages:
    """Returns the prompt with what `reset` returned: a text or parts of content go to its last message."""
    if isinstance(said, list) and all(isinstance(one, Mapping) and "role" in one for one in said):
        return [*messages_said(prompt or []), *said]
    if isinstance(said, str) and (prompt is None or isinstance(prompt, str)):
        return (prompt or "") + said
    messages = messages_said(prompt or "")
    last: Message = messages[-1]
    return [*messages[:-1], {**last, "content": joined(last["content"], said)}]


def joined(content: Any, said: Any) -> Any:
    """Returns two contents as one: both texts, or both lists of parts."""
    if isinstance(content, str) and isinstance(said, str):
        return content + said
    return [*parts(content), *parts(said)]


def parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] * bool(content) if isinstance(content, str) else list(content)
