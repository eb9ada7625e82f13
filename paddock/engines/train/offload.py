"""Where a role's tensors are while it is idle: in pinned host memory, and on their way while others work.

What moves are storages. They give up their memory and get new memory later; the tensors, views and modules over them
stay the objects that they are, so nobody else has to know. Copies run beside the work of the device, and the host waits
for none of them. What has not been written since it came has a copy on the host already: it leaves by being dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paddock.core.device import Carrier

LEAST = 1 << 16
"""Bytes of a storage that is worth the way."""
CHUNK = 1 << 26
"""Bytes of pinned memory that are asked for at a time. Torch rounds each request up to a power of two."""
ALIGNED = 512

P = ParamSpec("P")
R = TypeVar("R")


class Berth:
    """Room on the host for what one storage holds."""

    def __init__(self, pieces: list[Tensor], size: int):
        self.pieces, self.size = pieces, size
        self.current = False
        """Whether it holds what the device holds, or held last."""


class Offload:
    """The tensors that `tensors` names at any time: on the device, or on the host."""

    def __init__(self, carrier: Carrier, tensors: Callable[[], Iterable[Tensor]], least: int = LEAST):
        self.carrier, self.tensors, self.least = carrier, tensors, least
        self.berths: dict[StorageWeakRef, Berth] = {}
        self.away = False
        self.arrival: Any = None
        self.sent = self.fetched = 0
        """Bytes that were copied to the host, and to the device."""

    @torch.no_grad()
    def leave(self) -> None:
        """Behind the work that was launched so far."""
        if self.away:
            return
        self.arrive()
        storages = self.storages(self.tensors())
        self.make_room(storages)
        with self.carrier.copying():
            for ref, storage in storages.items():
                if not self.berths[ref].current:
                    self.send(storage, self.berths[ref])
        for storage in storages.values():
            storage.resize_(0)
        self.away = True

    @torch.no_grad()
    def come(self) -> None:
        """Starts the way back. Who needs the values calls `arrive` before."""
        if not self.away:
            return
        storages = self.storages(self.tensors())
        found = [(storage, self.berths[ref]) for ref, storage in storages.items() if ref in self.berths]
        for storage, berth in found:
            storage.resize_(berth.size)
        with self.carrier.copying():
            for storage, berth in found:
                for part, piece in pairs(bytes_of(storage), berth.pieces):
                    part.copy_(piece, non_blocking=True)
                self.fetched += berth.size
        self.arrival, self.away = self.carrier.launched(), False

    def arrive(self) -> None:
        """Work that is launched from now on finds the values."""
        self.carrier.wait(self.arrival)
        self.arrival = None

    def written(self, tensors: Iterable[Tensor] | None = None) -> None:
        """The host's copies of these, or of all, are old now."""
        refs = self.berths if tensors is None else self.storages(tensors)
        for ref in refs:
            if ref in self.berths:
                self.berths[ref].current = False

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """On the device for the time of the block, and then where it was."""
        away = self.away
        self.come()
        self.arrive()
        yield
        if away:
            self.leave()

    def storages(self, tensors: Iterable[Tensor]) -> dict[StorageWeakRef, torch.UntypedStorage]:
        """Those that leave, each once: those with a berth, which may be empty now, and those that are large enough.

        Memory that is not torch's own, a mapped file say, is not its to give back.
        """
        found: dict[StorageWeakRef, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # of a sharded one, this rank's part
            ref, there = StorageWeakRef(storage), storage.device.type == self.carrier.device.type
            if ref in self.berths or (there and storage.nbytes() >= self.least and storage.resizable()):
                found[ref] = storage
        return found

    def make_room(self, storages: dict[StorageWeakRef, torch.UntypedStorage]) -> None:
        """Once for each storage; room of those that are gone is given back."""
        self.berths = {ref: berth for ref, berth in self.berths.items() if ref in storages}
        new = [ref for ref in storages if ref not in self.berths]
        rooms = self.rooms([storages[ref].nbytes() for ref in new])
        for ref, pieces in zip(new, rooms, strict=True):
            self.berths[ref] = Berth(pieces, storages[ref].nbytes())

    def rooms(self, sizes: list[int]) -> Iterator[list[Tensor]]:
        padded = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        left, free = sum(padded), torch.empty(0, dtype=torch.uint8)
        for size in padded:
            pieces: list[Tensor] = []
            while size:
                if len(free) == 0:
                    free = self.carrier.host(min(left, CHUNK))
                    left -= len(free)
                piece, free = free[:size], free[size:]
                pieces.append(piece)
                size -= len(piece)
            yield pieces

    def send(self, storage: torch.UntypedStorage, berth: Berth) -> None:
        for part, piece in pairs(bytes_of(storage), berth.pieces):
            piece.copy_(part, non_blocking=True)
            self.carrier.keep(part)
        berth.current = True
        self.sent += berth.size


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def pairs(data: Tensor, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of these bytes, and where they are on the host."""
    start = 0
    for piece in pieces:
        part = data[start : start + len(piece)]
        start += len(piece)
        yield part, piece[: len(part)]


def offloads_of(engine: Any) -> list[Offload]:
    """Returns the offloads of an engine's weights and of its optimizer, as far as there are any."""
    both = (engine.offload, engine.updater.offload if engine.updater else None)
    return [offload for offload in both if offload is not None]


def at_home(method: Callable[P, R]) -> Callable[P, R]:
    """While this method of an engine runs, all that the engine offloads is on the device."""

    @wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        engine: Any = args[0]
        with ExitStack() as stack:
            for offload in offloads_of(engine):
                stack.enter_context(offload.interrupted())
            return method(*args, **kwargs)

    return wrapped
