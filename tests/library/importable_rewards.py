"""Rewards in a module that other processes import: they run in the pool."""

from __future__ import annotations

from typing import Any


def fields(completion: str, answer: str) -> float:
    return float(answer in completion)


def row(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(ground_truth in solution_str)


def columns(prompts: list[Any], completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(truth in text) for text, truth in zip(texts, answer, strict=True)]


def scaled(factor):
    def score(completion):
        return factor * len(completion)

    return score


doubled = scaled(2)
