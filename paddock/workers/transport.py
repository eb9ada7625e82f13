"""Packs what travels between processes as arrays, which Ray hands over without a copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paddock.engines.rollout.base import Chosen, Completion
from paddock.engines.train.base import Outputs
from paddock.workers.reward_model import ModelScores


@dataclass(frozen=True, eq=False)
class Completions:
    """Responses, one after the other."""

    rows: np.ndarray
    keys: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray
    stopped: np.ndarray
    finished: np.ndarray
    experts: list[tuple[np.ndarray, np.ndarray]] | None
    """Experts of prompt and response, if the engine records them."""

    @classmethod
    def of(cls, completions: list[Completion]) -> Completions:
        return cls(
            rows=np.array([one.row for one in completions], dtype=np.int64),
            keys=np.array([one.key for one in completions], dtype=np.int64),
            lengths=np.array([len(one.tokens) for one in completions], dtype=np.int64),
            tokens=np.array([token for one in completions for token in one.tokens], dtype=np.int32),
            log_probs=np.array([value for one in completions for value in one.log_probs], dtype=np.float32),
            stopped=np.array([one.stopped for one in completions], dtype=bool),
            finished=np.array([one.finished for one in completions], dtype=bool),
            experts=[(one.experts.prompt.numpy(), one.experts.response.numpy()) for one in completions if one.experts]
            or None,
        )

    def unpacked(self) -> list[Completion]:
        ends = self.lengths.cumsum()
        spans = list(zip((ends - self.lengths).tolist(), ends.tolist(), strict=True))
        tokens, log_probs = self.tokens.tolist(), self.log_probs.tolist()
        chosen: list[Chosen | None] = [None] * len(spans)
        if self.experts:
            chosen = [Chosen(torch.tensor(prompt), torch.tensor(response)) for prompt, response in self.experts]
        drawn = [(tokens[start:end], log_probs[start:end]) for start, end in spans]
        marks = self.stopped.tolist(), chosen, self.keys.tolist(), self.finished.tolist()
        facts = zip(self.rows.tolist(), drawn, *marks, strict=True)
        return [Completion(row, *own, *rest) for row, own, *rest in facts]


def to_arrays(answer: Any) -> Any:
    """Turns tensors and lists of completions into arrays, also inside of outputs and scores."""
    if isinstance(answer, Tensor):
        return answer.numpy(force=True)
    if isinstance(answer, Outputs | ModelScores):
        return replace(answer, **{name: to_arrays(value) for name, value in vars(answer).items()})
    if isinstance(answer, list) and answer and isinstance(answer[0], Completion):
        return Completions.of(answer)
    return answer


def from_arrays(answer: Any) -> Any:
    """Turns arrays back into tensors; copies them, since other readers share their memory."""
    if isinstance(answer, np.ndarray):
        return torch.tensor(answer)
    if isinstance(answer, Outputs | ModelScores):
        return replace(answer, **{name: from_arrays(value) for name, value in vars(answer).items()})
    return answer.unpacked() if isinstance(answer, Completions) else answer
