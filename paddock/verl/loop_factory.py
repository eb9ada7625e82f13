"""Which agent loops in verl's form there are: those of the config's YAML file, and those that modules registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from paddock.config.conversations import with_verl_limits
from paddock.config.roles import MultiTurnConfig
from paddock.environments.catalogue import Factory
from paddock.environments.tools import Tool
from paddock.errors import UserError
from paddock.verl.classes import class_of, entries
from paddock.verl.tools import VerlTool

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS: dict[str, Any] = {}
"""Classes that modules registered (`@register(name)`)."""


@dataclass(frozen=True)
class LoopFactory(Factory):
    """Makes the agent loop of each episode."""

    loop: Callable[..., Any] = object
    """The class."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor: those of its YAML entry, the config, and tools."""


class Holder:
    """Holds a part of the config as verl's constructors are given it: under `config`, or as it is in some versions."""

    def __init__(self, config: DictConfig):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def loop_arguments(settings: dict[str, Any], limits: MultiTurnConfig, tools: Sequence[Tool]) -> dict[str, Any]:
    """Returns what constructors of agent loops are given beside the episode's own; each takes what it names."""
    tree = OmegaConf.create(settings)
    tree.actor_rollout_ref.rollout.multi_turn = asdict(with_verl_limits(limits))
    tree.data.apply_chat_template_kwargs.pop("tools", None)
    data = Holder(tree.data)
    return {
        "trainer_config": Holder(tree), "dataset_config": data, "data_config": data, "dataset_cls": None,
        "processor": None, "hf_model_type": None, "tools": SimpleNamespace(tools=[handed(tool) for tool in tools]),
    }  # fmt: skip


def handed(tool: Tool) -> Any:
    """Returns a tool as verl's loops call it: an object of its class, or a FunctionTool."""
    if isinstance(tool, VerlTool):
        return tool.own
    of = partial(class_of, key=f"{AGENT}.default_agent_loop", path=tool.name)
    schema = of("verl.tools.schemas.OpenAIFunctionToolSchema").model_validate(tool.schema())
    beside = inspect.iscoroutinefunction(tool.function)
    return of("verl.tools.function_tool.FunctionTool")(tool.name, tool.function, schema, beside)


def no_environment() -> Any:
    raise AssertionError("an agent loop has no environment")


def listed_loops(path: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Returns the agent loops of a YAML file, each a class and its arguments: `[{name, _target_, ...}]`."""
    key = f"{AGENT}.agent_loop_config_path"
    loops = {}
    for entry in entries(path, key, None, "_target_"):
        if not isinstance(entry.get("name"), str):
            raise UserError(f"{entry['_target_']} has no name", key=key, value=path, fix="- name: my_agent")
        rest = {name: value for name, value in entry.items() if name != "_target_"}
        loops[entry["name"]] = class_of(entry["_target_"], key, path), rest
    return loops
