"""Environments by name: what a config or a program asks for becomes a factory that makes one object per episode.

    games.py:Guess                      a class, or a function that returns an object, of a file
    games.py:GAMES                      a dict of such, by the names that rows give in their column `environment`
    pkg://package.module:Guess          the same of a module; `pkg://` may be left out
    textarena:Wordle-v0                 an environment of another package, by that package's own name for it

A module that the config imports first (`external_lib`) may add a prefix: `SOURCES.register("mine")(source)`, where
`source(rest, kwargs)` is called with what stands after the colon, and returns a function that makes an environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock.core.background import Workers
from paddock.core.registry import Registry, suggest
from paddock.environments import builtin
from paddock.environments.adapters import gem, openenv, reasoning_gym, skyrl_gym, textarena, verifiers_adapter
from paddock.environments.environment import Environment, overrides
from paddock.environments.packages import refused
from paddock.environments.plain_class import PlainEnvironment
from paddock.environments.tools import Tool
from paddock.errors import UserError
from paddock.facts.modules import MODULE, blaming, user_module

Source = Callable[[str, Mapping[str, Any]], Callable[[], Environment]]
SOURCES: Registry[Source] = Registry("source of environments", key="environment")
"""Prefixes of names; `PREFIX:REST` is made by `SOURCES.get(PREFIX)(REST, kwargs)`."""
for adapter in (builtin, gem, openenv, reasoning_gym, skyrl_gym, textarena):
    SOURCES.register(adapter.__name__.rpartition(".")[2])(adapter.source)
SOURCES.register("verifiers")(verifiers_adapter.source)
FORMS = "FILE.py:Class, package.module:Class"
UNMADE = "cannot be made:"


@dataclass(frozen=True)
class Factory:
    """Makes the environment of each episode, and says what is known before any episode."""

    name: str
    make: Callable[[], Environment]
    tools: Sequence[Tool]
    """The tools that the policy may call; their functions belong to an object that is closed."""
    max_turns: int | None
    inline: bool = False
    """True: its environments are made here, not in a thread: at once, or because they need the main thread."""
    may_pay: bool = True
    """False: its environments pay nothing, whatever the policy does."""
    conversation: Callable[..., Any] | None = None
    """The class that plays an episode; None: `rollouts.conversation.Conversation`."""


def environment_of(
    name: str | Callable[..., Any], kwargs: Mapping[str, Any] | None = None, seconds: float = 60.0
) -> Factory:
    """Returns the factory of a name, of a class, or of a function that returns an environment.

    `kwargs` go to the constructor. One object is made here, for its tools, and closed at once, each within `seconds`.
    """
    kwargs = kwargs or {}
    if isinstance(name, str):
        named, make = name, maker_of(name, kwargs)
    else:
        named = getattr(name, "__qualname__", type(name).__qualname__)
        make = constructor(name, kwargs, named)

    def opened() -> tuple[Environment, tuple[Tool, ...]]:
        first = make()
        return first, tuple(first.tools())

    workers = Workers()
    try:
        try:
            first, tools = workers.start(opened).result(seconds)
        except UserError as error:
            if not workers.sent_back(named, error.__cause__):
                raise
            first, tools = opened()
        workers.end(first.close)
        here = first.inline or named in workers.main_only
        return Factory(named, make, tools, first.max_turns, here, may_pay(first))
    except TimeoutError:
        fix = f"actor_rollout_ref.rollout.multi_turn.tool_timeout={2 * seconds:g}"
        raise refused(named, f"making it took longer than {seconds:g} s", fix) from None
    finally:
        workers.close(seconds)


def may_pay(environment: Environment) -> bool:
    """False if neither `step` nor `reward` is its own: those of the base class pay nothing."""
    if isinstance(environment, PlainEnvironment):
        return hasattr(environment.plain, "get_reward")
    return overrides(environment, "step") or overrides(environment, "reward")


def maker_of(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes the environment of this name."""
    prefix, _, rest = name.partition(":")
    if prefix in SOURCES:
        with blaming(UNMADE, "environment", name, called_with(kwargs)):
            return guarded(SOURCES.get(prefix)(rest, kwargs), name, called_with(kwargs))
    thing = thing_at(name)
    if not callable(thing):
        raise refused(name, "holds several environments, and here one is wanted", f"{FORMS}, or the dict alone")
    return constructor(thing, kwargs, name)


def environments_at(name: str) -> dict[str, Any] | None:
    """Returns the environments of a dict in a file or module by their names; None if this is no dict's name."""
    thing = None if name.partition(":")[0] in SOURCES else thing_at(name)
    return dict(thing) if isinstance(thing, Mapping) else None


def address(name: str) -> tuple[str, str]:
    """Returns the file, or `pkg://` and the module, and the name in it."""
    path, colon, attribute = name.rpartition(":")
    prefix = name.partition(":")[0]
    if name.endswith(".py") or not colon:
        known = f"or PREFIX:NAME with a prefix; {suggest(prefix, SOURCES.names())}"
        fix = f"{name}:Class" if name.endswith(".py") else f"{FORMS}, {known}"
        raise refused(name, "does not name a class", fix)
    if not path.endswith(".py") and not path.startswith(MODULE):
        if "." not in path and ("/" in path or ":" in path or importlib.util.find_spec(path) is None):
            raise refused(name, f"there is no source of environments {prefix!r}", suggest(prefix, SOURCES.names()))
        path = MODULE + path
    return path, attribute


def constructor(thing: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> Callable[[], Environment]:
    """Returns a function that calls a class or function, and returns its object as an environment."""

    def make() -> Environment:
        made = thing(**kwargs)
        return made if isinstance(made, Environment) else PlainEnvironment(made)

    return guarded(make, name, f"{called_with(kwargs)}; it takes {signature(thing)}")


def guarded(make: Callable[[], Environment], name: str, fix: str) -> Callable[[], Environment]:
    """Returns a function that does the same, and whose exceptions say which environment cannot be made."""

    def guard() -> Environment:
        with blaming(UNMADE, "environment", name, fix):
            return make()

    return guard


def called_with(kwargs: Mapping[str, Any]) -> str:
    given = ", ".join(f"{key}={value!r:.40}" for key, value in kwargs.items()) or "no arguments"
    return f"it is called with {given}"


def thing_at(name: str) -> Any:
    """Returns the class or function at an address, or the dict of several."""
    path, attribute = address(name)
    module = user_module(path, "environment", name, f"check the path; it is looked for in {Path.cwd()}")
    thing = getattr(module, attribute, None)
    if not callable(thing) and not isinstance(thing, Mapping):
        own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        here = [key for key, value in own.items() if callable(value) and not key.startswith("_")]
        raise refused(name, f"has no class or function {attribute!r}", suggest(attribute, here))
    return thing


def signature(thing: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(thing))
    except (TypeError, ValueError):  # written in C, without a signature
        return "what its documentation says"
