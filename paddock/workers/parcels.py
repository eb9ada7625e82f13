"""What travels between processes, as arrays: they are handed over without being copied, or read element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paddock.engines.rollout.base import Chosen, Completion


@dataclass(frozen=True, eq=False)
class Completions:
    """Responses end to end."""

    rows: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray
    stopped: np.ndarray
    experts: list[tuple[np.ndarray, np.ndarray]] | None
    """Of prompt and response, where the engine records them."""

    @classmethod
    def of(cls, completions: list[Completion]) -> Completions:
        return cls(
            rows=np.array([one.row for one in completions], dtype=np.int64),
            lengths=np.array([len(one.tokens) for one in completions], dtype=np.int64),
            tokens=np.array([token for one in completions for token in one.tokens], dtype=np.int32),
            log_probs=np.array([value for one in completions for value in one.log_probs], dtype=np.float32),
            stopped=np.array([one.stopped for one in completions], dtype=bool),
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
        facts = zip(self.rows.tolist(), spans, self.stopped.tolist(), chosen, strict=True)
        return [Completion(row, tokens[a:b], log_probs[a:b], stopped, by) for row, (a, b), stopped, by in facts]


def to_arrays(thing: Any) -> Any:
    """Tensors and lists of completions become arrays, also inside of dicts."""
    if isinstance(thing, Tensor):
        return thing.numpy(force=True)
    if isinstance(thing, dict):
        return {name: to_arrays(value) for name, value in thing.items()}
    if isinstance(thing, list) and thing and isinstance(thing[0], Completion):
        return Completions.of(thing)
    return thing


def from_arrays(thing: Any) -> Any:
    """The way back; memory that arrays share with others is left alone."""
    if isinstance(thing, np.ndarray):
        return torch.tensor(thing)
    if isinstance(thing, dict):
        return {name: from_arrays(value) for name, value in thing.items()}
    return thing.unpacked() if isinstance(thing, Completions) else thing
