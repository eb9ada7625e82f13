"""What engines with a copy of the weights have in common: how new weights travel, and how rows are seeded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from paddock.config.roles import ActorRolloutRefConfig, RolloutConfig
from paddock.config.schema import DataConfig
from paddock.core.device import compute_dtype, device_of
from paddock.core.rng import Stream, words
from paddock.engines.rollout.base import CopyEngine, Limits, Request, Sampling
from paddock.engines.rollout.stops import StopTable, StopTables
from paddock.errors import UserError


class WeightCopy(CopyEngine):
    """An engine of another package: weights arrive in buckets, and are stale until the first have come."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: str,
        free_cache: bool = True,
        staged_wake: bool = False,
        stop_tables: StopTables | None = None,
    ):
        """`stop_tables`: they know the texts of tokens, for samplings with stop strings."""
        self.stop_tables = stop_tables or StopTables()
        self.strings: StopTable | None = None
        self.dtype, self.staged_wake = dtype, staged_wake
        self.frees = free_cache and device != "cpu"  # a CPU's sleep frees nothing
        self.asleep, self.stale = False, True
        self.sampling: Sampling | None = None
        self.parts = False

    def resume(self, sampling: Sampling, limits: Limits) -> None:
        """Opens a session. The package sizes its cache by its own arguments, whatever the limits."""
        assert not self.stale, "the engine has no weights yet, or they were given up while it slept"
        assert self.sampling is None, "a session is open: pause it first"
        self.sampling, self.parts = sampling, limits.parts
        self.strings = self.stop_tables.of(sampling.stop, torch.device("cpu"))

    @abstractmethod
    def release(self) -> None:
        """Frees weights and KV cache on the device."""

    @abstractmethod
    def restore(self, part: str | None) -> None:
        """Allocates what was freed: "weights", "kv_cache", or both."""

    @abstractmethod
    def drop_cache(self) -> None:
        """Drops keys and values that were computed with the old weights."""

    def sleep(self) -> None:
        """Frees weights and KV cache on the device; the weights come with the next sync, or frozen ones from the
        host's memory."""
        if self.frees and not self.asleep:
            self.release()
            self.asleep = self.stale = True

    def wake(self) -> None:
        if self.asleep:
            self.restore("weights" if self.staged_wake else None)
            self.asleep = False

    def begin_anew(self) -> None:
        """Drops everything that was computed with the old weights."""
        if self.staged_wake and self.frees:
            self.restore("kv_cache")
        self.drop_cache()
        self.stale = False


def copy_keys(group: ActorRolloutRefConfig, data: DataConfig, device: str | None) -> dict[str, Any]:
    """Returns the arguments of a `WeightCopy` that keys set."""
    rollout = group.rollout
    return {
        "dtype": compute_dtype(rollout.dtype, device_of(device)),
        "device": str(device),
        "free_cache": rollout.free_cache_engine and group.hybrid_engine,
        "staged_wake": rollout.multi_stage_wake_up,
        "stop_tables": StopTables.of_keys(group, data),
    }


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
    high, low, *_ = words(sampling.seed, request.step, torch.tensor(request.rows), request.start, Stream.SAMPLE)
    return ((high >> 1 << 32) | low).tolist()


def bucket_bytes(rollout: RolloutConfig) -> int:
    """Returns the most bytes of weights that travel together."""
    return rollout.checkpoint_engine.update_weights_bucket_megabytes << 20


def buckets(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[tuple[list[tuple[str, Tensor]], bool]]:
    """Yields neighbours of at most `size` bytes together, a larger one alone; and whether they are the last."""
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > size:
            yield bucket, False
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    yield bucket, True
