"""The interaction of verl's GSM8K examples: a user who says whether the answer is right."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Compares `#### answer` of the policy's last turn with `interaction_kwargs.ground_truth`."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(  # type: ignore[override]
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        turns = [message.get("content") for message in messages if message.get("role") == "assistant"]
        self._instance_dict[instance_id]["response"] = turns[-1] if turns else ""
        score = await self.calculate_score(instance_id)
        return score == 1.0, RIGHT if score == 1.0 else WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:  # type: ignore[override]
        known = self._instance_dict[instance_id]
        return gsm8k.compute_score(known["response"], known["ground_truth"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        self._instance_dict.pop(instance_id, None)
