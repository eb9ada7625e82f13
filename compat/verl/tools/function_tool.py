"""Functions as tools under verl's names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paddock.environments.tools import written
from paddock.verl.tools import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


@dataclass
class FunctionTool:
    """Holds a function that an agent loop calls as a tool."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        return await self.fn(**parameters) if self.is_async else await asyncio.to_thread(self.fn, **parameters)


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Returns what a function returned as a response, a reward and metrics."""
    found = ret if isinstance(ret, tuple) else (ret,)
    if not 1 <= len(found) <= 3:
        raise TypeError(f"a tool returns a response, a reward and metrics; this one returned {len(found)} values")
    response, reward, metrics = (*found, None, None)[:3]
    response = response if isinstance(response, ToolResponse) else ToolResponse(text=written(response))
    return response, float(reward or 0.0), dict(metrics or {})


__all__ = ["FunctionTool", "function_tool", "normalize_function_tool_return"]
