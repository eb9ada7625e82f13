"""Sends the actor's weights to rollout engines in other processes, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paddock.config.roles import RolloutConfig
from paddock.core.device import SharedTensor, compute_dtype, shares_memory, synchronize
from paddock.core.processes import is_first
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.copies import bucket_bytes, buckets
from paddock.workers.policy import Policy
from paddock.workers.probe import gap_of, question, tolerance

ALIGNED = 16
"""Tensors begin at multiples of this many bytes, so that they can be read without a copy."""


Places = list[tuple[str, torch.dtype, torch.Size, int]]
"""Name, type, shape and first byte of each tensor."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some weights, one after the other, as bytes: on the host, or in a device's memory that its readers share."""

    data: np.ndarray | SharedTensor
    tensors: Places
    first: bool
    last: bool

    @classmethod
    def of(
        cls, weights: list[tuple[str, Tensor]], first: bool, last: bool, shared: torch.device | None = None
    ) -> Bucket:
        """`shared`: the device whose memory the readers share."""
        tensors: Places = []
        end = 0
        for name, tensor in weights:
            tensors.append((name, tensor.dtype, tensor.shape, end))
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        data = torch.empty(end, dtype=torch.uint8, device=shared or "cpu")
        for (_, there), (_, tensor) in zip(views(data, tensors), weights, strict=True):
            there.copy_(tensor)
        return cls(SharedTensor(data) if shared else data.numpy(), tensors, first, last)

    def unpacked(self, device: torch.device) -> list[tuple[str, Tensor]]:
        """Returns copies on the device: the bytes are shared by all readers, or the sender's own, who may overwrite
        them as soon as this returns."""
        if isinstance(self.data, SharedTensor):
            copies = self.data.open().clone()
            synchronize(copies.device)
            return views(copies, self.tensors)
        return views(torch.tensor(self.data, device=device), self.tensors)


def views(data: Tensor, tensors: Places) -> list[tuple[str, Tensor]]:
    found = []
    for name, dtype, shape, start in tensors:
        size = shape.numel() * dtype.itemsize
        found.append((name, data[start : start + size].view(dtype).view(shape)))
    return found


class WeightSender:
    """Sends the actor's weights from one of its processes, and judges what the engines made of them."""

    def __init__(self, actor: Policy, limits: RolloutConfig, beside: bool):
        """`beside`: an engine in another process has the device of this one."""
        device = actor.engine.device
        self.actor, self.engine, self.limits = actor, actor.engine, limits
        self.dtype = compute_dtype(limits.dtype, device)
        self.size = bucket_bytes(limits)
        self.sent = -1
        """Version of the weights that the engines have; -1: none."""
        self.stream: Iterator[tuple[list[tuple[str, Tensor]], bool]] | None = None
        self.shared = device if beside and shares_memory(device) else None
        """The device whose memory the engine beside this process reads; None: buckets travel through the host's."""
        self.kept: Bucket | None = None

    def unsent(self) -> bool:
        """Tells whether the engines lack the actor's weights: at the start, and after a checkpoint was loaded."""
        return self.sent != self.actor.version

    def finish(self) -> int:
        """Frees the last bucket, which all engines have read; returns the version of the weights that they have."""
        self.kept = None
        return self.sent

    def next_bucket(self) -> Bucket | None:
        """Gathers the next bucket on every rank; adapters are merged. Returns it on the first rank for all engines, or
        on each for the engine beside it. The bucket before has been read."""
        self.kept = None
        first = self.stream is None
        self.stream = self.stream or buckets(self.engine.weights(), self.size)
        weights, last = next(self.stream)
        if last:
            self.stream, self.sent = None, self.actor.version
        if not (self.shared or is_first()):
            return None
        bucket = Bucket.of(weights, first, last, self.shared)
        self.kept = bucket if self.shared else None
        return bucket

    def question(self) -> tuple[Prompt, Sampling]:
        return question(self.engine, self.limits)

    def gaps(self, prompt: Prompt, answers: list[list[Completion]]) -> tuple[list[float], float]:
        """Returns the gap of each engine, and the largest one that rounding explains."""
        return [gap_of(self.engine, prompt, found) for found in answers], tolerance(self.engine, self.dtype)
