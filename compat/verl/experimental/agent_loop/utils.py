"""Helpers of agent loops under verl's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def resolve_config_path(config_path: str) -> str:
    return config_path


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """Returns a tool's result as gpt-oss reads it."""
    return f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    return f"{message_content}<|start|>assistant"


def build_gpt_oss_tool_response_text(messages: Sequence[Mapping[str, Any]], tool_call_names: Sequence[str]) -> str:
    results = zip(messages, tool_call_names, strict=True)
    texts = [format_gpt_oss_tool_response_manually(message["content"], name) for message, name in results]
    return add_generation_prompt_for_gpt_oss("".join(texts))
