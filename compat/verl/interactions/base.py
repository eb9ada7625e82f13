"""The base class of interactions under verl's name."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """Answers turns of the policy as a user would. An episode is an instance of it, by an id."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Returns whether the episode ends, what the user says, the turn's score, and anything else."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """Frees what the episode held."""
