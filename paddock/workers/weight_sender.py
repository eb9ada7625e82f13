"""Sends the actor's weights to rollout engines in other processes, bucket by bucket."""

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
from paddock.workers.policy import Policy
from paddock.workers.probe import gap_of, question, tolerance

ALIGNED = 16
"""Tensors begin at multiples of this many bytes, so that they can be read without a copy."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some weights, one after the other, as bytes."""

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
        """Returns copies on the device: the stored bytes are shared by all readers."""
        return self.views(torch.tensor(self.data, device=device))


class WeightSender:
    """Sends the actor's weights from one of its processes, and judges what the engines made of them."""

    def __init__(self, actor: Policy, config: Config):
        self.actor, self.engine, self.limits = actor, actor.engine, config.actor_rollout_ref.rollout
        self.dtype = compute_dtype(self.limits.dtype, device_of(config.trainer.device))
        self.size = self.limits.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.sent = -1
        """Version of the weights that the engines have; -1: none."""
        self.stream: Iterator[tuple[list[tuple[str, Tensor]], bool]] | None = None

    def unsent(self) -> bool:
        """Tells whether the engines lack the actor's weights: at the start, and after a checkpoint was loaded."""
        return self.sent != self.actor.version

    def version(self) -> int:
        """Returns the version of the weights that the engines have."""
        return self.sent

    def next_bucket(self) -> Bucket | None:
        """Gathers the next bucket on every rank and returns it on the first; adapters are merged."""
        first = self.stream is None
        self.stream = self.stream or buckets(self.engine.weights(), self.size)
        weights, last = next(self.stream)
        if last:
            self.stream, self.sent = None, self.actor.version
        return Bucket.of(weights, first, last) if is_first() else None

    def question(self) -> tuple[Prompt, Sampling]:
        return question(self.engine, self.limits)

    def gaps(self, prompt: Prompt, answers: list[list[Completion]]) -> tuple[list[float], float]:
        """Returns the gap of each engine, and the largest one that rounding explains."""
        return [gap_of(self.engine, prompt, found) for found in answers], tolerance(self.engine, self.dtype)
