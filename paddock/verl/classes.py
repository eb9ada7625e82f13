"""Classes that YAML files in verl's form name: tools, interactions, agent loops. They are asked for methods by name, so
that those of verl itself and those of `compat/verl` serve alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.facts.compat import importable
from paddock.facts.modules import blaming, module_named

Entry = dict[str, Any]
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def entries(path: str, key: str, section: str | None, needed: str) -> list[Entry]:
    """Returns the entries of a YAML file: a list, or the one under `section`. Each has the field `needed`."""

    def refused(reason: str, fix: str) -> UserError:
        return UserError(reason, key=key, value=path, fix=fix)

    file = Path(path).expanduser()
    if not file.is_file():
        raise refused("there is no such file", f"check the path; it is looked for in {Path.cwd()}")
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise refused(f"cannot be read: {str(error).splitlines()[0]}", "mend the YAML") from error
    if section is not None:
        content = content.get(section) if isinstance(content, Mapping) else None
    form = f"- {needed}: ..."
    fix = f"{section}:\n    {form}" if section else form
    if not isinstance(content, list) or not content:
        raise refused(f"holds no list{f' {section!r}' if section else ''}", f"write one: {fix}")
    for number, entry in enumerate(content):
        if not isinstance(entry, dict) or not isinstance(entry.get(needed), str):
            raise refused(f"entry {number} has no {needed!r}", fix)
    return content


def require_known(name: str, key: str, path: str) -> None:
    """Refuses a class of verl's that Paddock's package of this name has not. Imports nothing of the user's."""
    module = name.rpartition(".")[0]
    if not module:
        reason, fix = "is no package.module.Class", "name the module as well"
        raise UserError(f"{name} {reason}", key=key, value=path, fix=fix)
    if not module.startswith("verl."):
        return
    importable()
    try:
        spec = find_spec(module)
    except ImportError:
        spec = None
    if spec is None:
        fix = f"Paddock has no {module}: write it yourself, in a file of function_tool_path if it is a tool"
        raise UserError(f"{name} cannot be imported: no module named {module!r}", key=key, value=path, fix=fix)


def class_of(name: str, key: str, path: str) -> Any:
    """Returns the class `package.module.Class`; `key` and `path` are the setting and the file that name it."""
    require_known(name, key, path)
    module_name, _, attribute = name.rpartition(".")
    fix = "a module that this Python imports: check its name, and PYTHONPATH"
    with blaming(f"{name} cannot be imported:", key, path, fix):
        module = module_named(module_name)
    member = getattr(module, attribute, None)
    if not callable(member):
        own = [other for other, value in vars(module).items() if isinstance(value, type) and not other.startswith("_")]
        reason = f"{name} is not there: the module has no class {attribute!r}"
        raise UserError(reason, key=key, value=path, fix=suggest(attribute, own))
    return member


def made(thing: Callable[..., Any], name: str, key: str, path: str, arguments: Mapping[str, Any]) -> Any:
    """Returns an object of a class; what its constructor raises is told with the class."""
    with blaming(f"{name} cannot be made:", key, path, f"it is called with {', '.join(arguments)}"):
        return thing(**arguments)


def taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those arguments that a function takes: signatures differ between versions of verl."""
    names = named(getattr(function, "__func__", function))
    return {name: value for name, value in given.items() if names is None or name in names}


@lru_cache(maxsize=1024)
def named(function: Callable[..., Any]) -> frozenset[str] | None:
    """Returns the names of a function's arguments; None: it takes any. Read once, for every episode asks."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY)


async def settled(value: Any) -> Any:
    """Returns a value, or what it becomes if it is awaitable: methods are coroutines, in older plug-ins functions."""
    return await value if inspect.isawaitable(value) else value
