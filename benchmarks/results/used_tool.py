"""A reward for conversations with a tool: a right answer is paid if the tool gave a result on the way to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddock.rewards.rules import compute_score as rule


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """`messages` are those behind the prompt, so an example in the prompt counts for nothing."""
    told = [message["content"] for message in extra_info["messages"] if message["role"] == "tool"]
    used = any(not content.startswith("error") for content in told)
    return rule(data_source, extra_info["last_turn"], ground_truth) if used else 0.0
