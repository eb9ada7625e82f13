"""The tool of verl's GSM8K examples: it tells the policy whether an answer is right."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k

NOT_BETTER = -0.05


class Gsm8kTool(BaseTool):
    """Compares an answer with `create_kwargs.ground_truth`; one that is no better than the last costs a little."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(  # type: ignore[override]
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        truth = (kwargs.get("create_kwargs") or {}).get("ground_truth") if ground_truth is None else ground_truth
        self._instance_dict[instance_id] = {"response": "", "ground_truth": truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        answer, known = str(parameters.get("answer", "")), self._instance_dict[instance_id]
        known["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        paid = 0.0 if reward > known["reward"] else NOT_BETTER
        known["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), paid, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        known = self._instance_dict[instance_id]
        return gsm8k.compute_score(known["response"], known["ground_truth"], method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]
