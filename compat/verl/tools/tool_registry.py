"""Tools of a YAML file under verl's names."""

from __future__ import annotations

from typing import Any

from paddock.verl.classes import class_of
from paddock.verl.tools import TOOLS, load_verl_tools
from verl.tools.function_tool import FunctionTool, function_tool


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """Returns an object of each class that the file names."""
    return [one.own for one in load_verl_tools(str(tools_config_file))]


def get_tool_class(cls_name: str) -> Any:
    return class_of(cls_name, TOOLS, cls_name)


__all__ = ["FunctionTool", "function_tool", "get_tool_class", "initialize_tools_from_config"]
