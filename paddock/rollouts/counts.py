"""What a conversation counts, and the columns that a batch of episodes carries beside tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Counts:
    """Counts what a conversation did, for metrics."""

    turns: int = 0
    said: int = 0
    """Turns of tools or the environment."""
    tool_call_counts: int = 0
    malformed_calls: int = 0
    failed_calls: int = 0
    """Calls that raised, took too long, or named no tool."""
    cut_results: int = 0
    """Results that were longer than `max_tool_response_length`."""
    timeouts: int = 0
    tool_seconds: float = 0.0

    def columns(self) -> dict[str, Any]:
        """Returns the counts as columns of a batch. `num_turns` counts the prompt too, as verl does."""
        return {"num_turns": 1 + self.turns + self.said, **{name: vars(self)[name] for name in COUNTED}}


COUNTED = ("tool_call_counts", "malformed_calls", "failed_calls", "cut_results", "timeouts", "tool_seconds")
COLUMNS = ("conversation", "completion", "environment", "ended", "extra_fields", "reward_score", "num_turns", *COUNTED)
"""What a batch of episodes carries beside tokens."""
