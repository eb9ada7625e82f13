"""What a catalogue of programs is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

SCRIPT, FUNCTION, ASSERTS = "apps", "openai/openai_humaneval", "google-research-datasets/mbpp"
"""Data sources: a program that reads and writes, a function that `check` calls, asserts."""
ANSWER = {"inputs": ["41\n"], "outputs": ["42\n"]}
"""The row that hostile scripts are scored by."""


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    source: str
    answer: str
    """The model's text."""
    truth: Mapping[str, Any]
    cheat: bool = False
    """It does not solve the task, so it must score 0; any other may do its work and be hostile beside."""
    command: bool = False
    """It is run by `sh`, as reward_model.sandbox.command allows, not by Python."""


def script(kind: str, name: str, code: str, **more: Any) -> Case:
    return Case(kind, name, SCRIPT, f"```python\n{dedent(code).strip()}\n```", ANSWER, **more)


def function(kind: str, name: str, code: str, prompt: str, entry: str, test: str, **more: Any) -> Case:
    truth = {"prompt": dedent(prompt), "entry_point": entry, "test": dedent(test)}
    return Case(kind, name, FUNCTION, f"```python\n{dedent(code).strip()}\n```", truth, **more)


def asserts(kind: str, name: str, code: str, *tests: str, truth: Mapping[str, Any] | None = None, **more: Any) -> Case:
    whole = {"test_list": [dedent(test).strip() for test in tests], **(truth or {})}
    return Case(kind, name, ASSERTS, f"```python\n{dedent(code).strip()}\n```", whole, **more)
