"""Where verl before 0.8 has `verl.tools.tool_registry`."""

from verl.tools.tool_registry import get_tool_class, initialize_tools_from_config

__all__ = ["get_tool_class", "initialize_tools_from_config"]
