"""Offload of a role's tensors while it is idle: to pinned host memory, in copies beside the work of the device.

What moves are storages. They give up their memory and get new memory later; the tensors, views and modules over them
stay the objects that they are, so no other code has to know. The host waits for no copy. A storage that was not written
since it came back has a copy on the host already: its memory is freed without another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paddock.core.device import CopyStream

LEAST = 1 << 16
"""Bytes of the smallest storage that is offloaded."""
CHUNK = 1 << 26
"""Bytes of pinned memory that are asked for at a time. Torch rounds each request up to a power of two."""
ALIGNED = 512

P = ParamSpec("P")
R = TypeVar("R")


class HostBuffer:
    """Holds pinned memory for one storage."""

    def __init__(self, pieces: list[Tensor], size: int):
        self.pieces, self.size = pieces, size
        self.current = False
        """True if it holds what the device holds, or held last."""


class Offload:
    """Moves the tensors that `tensors` names at any time between the device and the host."""

    def __init__(self, copy_stream: CopyStream, tensors: Callable[[], Iterable[Tensor]], least: int = LEAST):
        self.copy_stream, self.tensors, self.least = copy_stream, tensors, least
        self.buffers: dict[StorageWeakRef, HostBuffer] = {}
        self.on_host = False
        self.arrival: Any = None
        self.sent = self.fetched = 0
        """Bytes that were copied to the host, and to the device."""

    @torch.no_grad()
    def to_host(self) -> None:
        """Copies changed tensors to pinned host memory, ordered after the work launched so far, and frees their
        device memory."""
        if self.on_host:
            return
        self.wait()
        storages = self.storages(self.tensors())
        self.make_buffers(storages)
        with self.copy_stream.copying():
            for ref, storage in storages.items():
                if not self.buffers[ref].current:
                    self.send(storage, self.buffers[ref])
        for storage in storages.values():
            storage.resize_(0)
        self.on_host = True

    @torch.no_grad()
    def prefetch(self) -> None:
        """Starts the copy to the device. Code that needs the values calls `wait` before."""
        if not self.on_host:
            return
        storages = self.storages(self.tensors())
        pairs = [(storage, self.buffers[ref]) for ref, storage in storages.items() if ref in self.buffers]
        for storage, buffer in pairs:
            storage.resize_(buffer.size)
        with self.copy_stream.copying():
            for storage, buffer in pairs:
                for part, piece in parts_of(bytes_of(storage), buffer.pieces):
                    part.copy_(piece, non_blocking=True)
                self.fetched += buffer.size
        self.arrival, self.on_host = self.copy_stream.launched(), False

    def wait(self) -> None:
        """Orders the work that is launched from now on after the copies to the device."""
        self.copy_stream.wait(self.arrival)
        self.arrival = None

    def written(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Marks the host's copies of these tensors, or of all, as out of date."""
        refs = self.buffers if tensors is None else self.storages(tensors)
        for ref in refs:
            if ref in self.buffers:
                self.buffers[ref].current = False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Moves the tensors to the device for the block, and then back to where they were."""
        on_host = self.on_host
        self.prefetch()
        self.wait()
        yield
        if on_host:
            self.to_host()

    def storages(self, tensors: Iterable[Tensor]) -> dict[StorageWeakRef, torch.UntypedStorage]:
        """Returns each storage that moves once: those with a buffer, which may be empty now, and large ones.

        Memory that is not torch's own, a mapped file say, is not torch's to free.
        """
        found: dict[StorageWeakRef, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # of a sharded one, this rank's part
            ref, there = StorageWeakRef(storage), storage.device.type == self.copy_stream.device.type
            if ref in self.buffers or (there and storage.nbytes() >= self.least and storage.resizable()):
                found[ref] = storage
        return found

    def make_buffers(self, storages: dict[StorageWeakRef, torch.UntypedStorage]) -> None:
        """Allocates a buffer for each new storage; frees the buffers of storages that are gone."""
        self.buffers = {ref: buffer for ref, buffer in self.buffers.items() if ref in storages}
        new = [ref for ref in storages if ref not in self.buffers]
        for ref, pieces in zip(new, self.allocated([storages[ref].nbytes() for ref in new]), strict=True):
            self.buffers[ref] = HostBuffer(pieces, storages[ref].nbytes())

    def allocated(self, sizes: list[int]) -> Iterator[list[Tensor]]:
        """Yields pieces of pinned memory for each size in bytes."""
        padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        left, free = sum(padded), torch.empty(0, dtype=torch.uint8)
        for size in padded:
            pieces: list[Tensor] = []
            while size:
                if len(free) == 0:
                    free = self.copy_stream.host(min(left, CHUNK))
                    left -= len(free)
                piece, free = free[:size], free[size:]
                pieces.append(piece)
                size -= len(piece)
            yield pieces

    def send(self, storage: torch.UntypedStorage, buffer: HostBuffer) -> None:
        for part, piece in parts_of(bytes_of(storage), buffer.pieces):
            piece.copy_(part, non_blocking=True)
            self.copy_stream.keep(part)
        buffer.current = True
        self.sent += buffer.size


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def parts_of(data: Tensor, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields parts of these bytes, each with the host memory that it is copied to or from."""
    start = 0
    for piece in pieces:
        part = data[start : start + len(piece)]
        start += len(piece)
        yield part, piece[: len(part)]


def offloads_of(engine: Any) -> list[Offload]:
    """Returns the offloads of an engine's weights and of its optimizer, as far as there are any."""
    both = (engine.offload, engine.updater.offload if engine.updater else None)
    return [offload for offload in both if offload is not None]


def with_state_on_device(method: Callable[P, R]) -> Callable[P, R]:
    """Moves all that an engine offloads to the device while this method of it runs."""

    @wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for offload in offloads_of(args[0]):
                stack.enter_context(offload.on_device())
            return method(*args, **kwargs)

    return wrapped
