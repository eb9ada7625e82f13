"""Turns what travels between processes into arrays, which Ray hands over without a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paddock.engines.train.base import Outputs
from paddock.workers.reward_model import ModelScores


def to_arrays(answer: Any) -> Any:
    """Turns tensors into arrays, also inside of outputs and scores."""
    if isinstance(answer, Tensor):
        return answer.numpy(force=True)
    if isinstance(answer, Outputs | ModelScores):
        return replace(answer, **{name: to_arrays(value) for name, value in vars(answer).items()})
    return answer


def from_arrays(answer: Any) -> Any:
    """Turns arrays back into tensors; copies them, since other readers share their memory."""
    if isinstance(answer, np.ndarray):
        return torch.tensor(answer)
    if isinstance(answer, Outputs | ModelScores):
        return replace(answer, **{name: from_arrays(value) for name, value in vars(answer).items()})
    return answer
