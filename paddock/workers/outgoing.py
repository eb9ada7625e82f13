"""The actor's weights on their way to engines in other processes, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paddock.config.schema import Config
from paddock.core.device import compute_dtype, device_of
from paddock.core.processes import is_first
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.copies import buckets
from paddock.engines.train.single import SingleEngine
from paddock.workers.probe import gap_of, question, tolerance

ALIGNED = 16
"""Bytes at whose multiples tensors begin, so that they are read where they lie."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some weights end to end, as bytes."""

    data: np.ndarray
    tensors: list[tuple[str, torch.dtype, torch.Size, int]]
    """Name, type, shape and first byte of each."""
    first: bool
    last: bool

    @classmethod
    def of(cls, weights: list[tuple[str, Tensor]], first: bool, last: bool) -> Bucket:
        tensors, end = [], 0
        for name, tensor in weights:
            tensors.append((name, tensor.dtype, tensor.shape, end))
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        data = torch.empty(end, dtype=torch.uint8)
        bucket = cls(data.numpy(), tensors, first, last)
        for (_, there), (_, tensor) in zip(bucket.views(data), weights, strict=True):
            there.copy_(tensor)
        return bucket

    def views(self, data: Tensor) -> list[tuple[str, Tensor]]:
        found = []
        for name, dtype, shape, start in self.tensors:
            size = shape.numel() * dtype.itemsize
            found.append((name, data[start : start + size].view(dtype).view(shape)))
        return found

    def unpacked(self, device: torch.device) -> list[tuple[str, Tensor]]:
        """Copies: what is stored belongs to all who read it."""
        return self.views(torch.tensor(self.data, device=device))


class Outgoing:
    """In a process of the actor's: what it sends, and how it judges what was made of it."""

    def __init__(self, engine: SingleEngine, config: Config):
        self.engine, self.limits = engine, config.actor_rollout_ref.rollout
        self.dtype = compute_dtype(self.limits.dtype, device_of(config.trainer.device))
        self.size = self.limits.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.stale = True  # the engines' weights are not these
        self.stream: Iterator[tuple[list[tuple[str, Tensor]], bool]] | None = None

    def next(self) -> Bucket | None:
        """Every rank gathers, the first one gives; adapters are merged."""
        first = self.stream is None
        self.stream = self.stream or buckets(self.engine.weights(), self.size)
        weights, last = next(self.stream)
        if last:
            self.stream, self.stale = None, False
        return Bucket.of(weights, first, last) if is_first() else None

    def question(self) -> tuple[Prompt, Sampling]:
        return question(self.engine, self.limits)

    def gaps(self, prompt: Prompt, answers: list[list[Completion]]) -> tuple[list[float], float]:
        """Of each engine, and the most that rounding explains."""
        return [gap_of(self.engine, prompt, found) for found in answers], tolerance(self.engine, self.dtype)
