"""What engines with a copy of the weights have in common: how new weights travel, and how rows are seeded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paddock.core.rng import Stream, words
from paddock.engines.rollout.base import CopyEngine, Request, Sampling
from paddock.errors import UserError


def require_no_images(requests: Iterable[Request], engine: str) -> None:
    """Tokens alone travel to a copy; answered without its images, a prompt would be another."""
    if any(request.images is not None for request in requests):
        raise UserError(
            "prompts have images, which this engine is not given",
            key="actor_rollout_ref.rollout.name",
            value=engine,
            fix="actor_rollout_ref.rollout.name=embedded",
        )


def row_seeds(request: Request, sampling: Sampling) -> list[int | None]:
    """Returns a seed of 63 bits per row, a function of (seed, step, row, first position) alone; None if greedy."""
    if sampling.temperature == 0.0:
        return [None] * len(request.rows)
    high, low, *_ = words(sampling.seed, request.step, torch.tensor(request.rows), request.start, 0, Stream.SAMPLE)
    return ((high >> 1 << 32) | low).tolist()


def load_in_buckets(engine: CopyEngine, weights: Iterable[tuple[str, Tensor]], size: int) -> None:
    first = True
    for bucket, last in buckets(weights, size):
        engine.load_bucket(bucket, first, last)
        first = False


def buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Neighbours of at most `size` bytes together, a larger one alone; and whether they are the last."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > size:
            yield bucket, False
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    yield bucket, True
