"""The code interpreter of verl's ReTool examples, over Paddock's sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from paddock.sandbox.program import Program, default_settings
from paddock.sandbox.runner import runner_of
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class SandboxFusionTool(BaseTool):
    """Runs Python programs: at the service that `sandbox_fusion_url` names, or without one in the local sandbox."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}
        self.default_timeout, self.default_language = config.get("default_timeout", 30), "python"
        language = config.get("default_language", "python")
        if language != "python":
            raise ValueError(f"default_language is {language!r}, and programs are run as python alone")
        self.sandbox_fusion_url = config.get("sandbox_fusion_url") or None
        settings = default_settings()
        limit = config.get("memory_limit_mb", settings.memory_limit_mb)
        settings = replace(settings, url=self.sandbox_fusion_url, memory_limit_mb=limit, timeout=self.default_timeout)
        self.runner = runner_of(settings)
        # Subclasses call `await self.execution_pool.execute.remote(self.execute_code, ...)`.
        self.execution_pool = SimpleNamespace(execute=SimpleNamespace(remote=in_thread))

    async def create(  # type: ignore[override]
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": []}
        return instance_id, ToolResponse()

    async def execute(  # type: ignore[override]
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        code, timeout = str(parameters.get("code", "")), parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        found = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return found if isinstance(found, ToolResponse) else ToolResponse(text=str(found)), None, None

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """Returns what a program printed; where it failed, why, so that the policy can mend it."""
        if language != self.default_language:
            return ToolResponse(text=f"error: programs are run as {self.default_language} alone, not as {language}")
        (result,) = self.runner.run_all([Program(code)], float(timeout))
        said = result.stdout + result.stderr
        return ToolResponse(text=said if result.passed else f"{said}\nerror: {result.cause} {result.detail}".strip())

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return self._instance_dict[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return asyncio.to_thread(function, *args, **kwargs)
