"""What autograd keeps for backward waits in host memory: sequences of any length, with little of them on the device.

Hooks on saved tensors move them out while the forward goes on, and back while backward comes down, one ahead of need.
Under gradient checkpointing what is saved are the inputs of the layers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from paddock.core.device import Carrier
from paddock.engines.train.offload import pairs
from paddock.engines.train.settings import Settings

LEAST = 1 << 20
"""Bytes of a tensor that is worth the way."""
PIECE = 1 << 24
"""Bytes of pinned memory that are asked for at a time: tensors of all sizes wait in pieces of one."""
BEHIND = 2
"""Tensors that may still be leaving while the forward goes on, and that come before backward asks for them."""


class Activations:
    """Of one model's forwards. Its parameters stay where they are."""

    def __init__(self, model: nn.Module, carrier: Carrier, least: int = LEAST):
        self.model, self.carrier, self.least = model, carrier, least
        self.room: list[Tensor] = []
        """Pinned memory that no tensor waits in: forwards after the first find what they need here."""

    @contextmanager
    def away(self) -> Iterator[Journey]:
        """What a forward in this block saves is not on the device between then and its use."""
        at_home = {param.untyped_storage().data_ptr() for param in self.stored()}
        journey = Journey(self.carrier, self.room, self.least, at_home)
        with saved_tensors_hooks(journey.leave, journey.come_back):
            yield journey

    def stored(self) -> Iterator[Tensor]:
        """Sharded parameters have no one storage; their gathered form is known by its type."""
        yield from (param for param in self.model.parameters() if type(param.data) is Tensor)


class Trip:
    """One tensor on its way."""

    def __init__(self, number: int, tensor: Tensor, pieces: list[Tensor]):
        self.number, self.pieces = number, pieces
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.here: Tensor | None = tensor
        """Where it is on the device: not yet gone, or back again."""
        self.copies: Any = None
        """What the work must wait for before this memory is another's, or before it reads it."""
        self.uses = 0


class Journey:
    """The tensors that one forward saved, in its order."""

    def __init__(self, carrier: Carrier, room: list[Tensor], least: int, at_home: set[int]):
        self.carrier, self.room, self.least, self.at_home = carrier, room, least, at_home
        self.trips: list[Trip] = []
        self.leaving: deque[Trip] = deque()
        self.known: dict[Any, tuple[StorageWeakRef, Trip]] = {}

    def leave(self, tensor: Tensor) -> Tensor | Trip:
        """A tensor that is saved more than once travels once."""
        if not self.travels(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.dtype, tensor._version
        alive, trip = self.known.get(key, (None, None))
        if trip is None or alive is None or alive.expired():  # its memory may have become another's
            trip = self.send(tensor.detach())
            self.known[key] = StorageWeakRef(storage), trip
        trip.uses += 1
        return trip

    def travels(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter):
            return False
        large = tensor.nbytes >= self.least and tensor.is_contiguous()
        return large and tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in self.at_home

    def send(self, tensor: Tensor) -> Trip:
        """The forward, which the host launches far ahead of the device, waits for copies that are too many behind:
        else memory would be taken anew for every layer before the first of them has left."""
        pieces = [self.room.pop() if self.room else self.carrier.host(PIECE) for _ in range(-(-tensor.nbytes // PIECE))]
        trip = Trip(len(self.trips), tensor, pieces)
        weakref.finalize(trip, self.room.extend, pieces)  # copies follow each other, so the next may be launched
        with self.carrier.copying():
            for part, piece in pairs(bytes_of(tensor), pieces):
                piece.copy_(part, non_blocking=True)
        trip.copies = self.carrier.launched()
        self.trips.append(trip)
        self.leaving.append(trip)
        while len(self.leaving) > BEHIND:
            gone = self.leaving.popleft()
            self.carrier.wait(gone.copies)
            gone.here = None
        return trip

    def come_back(self, saved: Tensor | Trip) -> Tensor:
        """The last to leave are still here."""
        if isinstance(saved, Tensor):
            return saved
        self.leaving.clear()
        self.fetch(saved)
        if saved.uses == 1:  # what every layer reads does not say whose turn it is
            self.fetch_before(saved)
        self.carrier.wait(saved.copies)
        tensor = saved.here
        assert tensor is not None
        saved.uses -= 1
        if saved.uses <= 0:
            saved.here = None
        return tensor

    def fetch_before(self, trip: Trip) -> None:
        """One comes for each that is used up, so that as many are ahead as were still here when backward began."""
        away = (one for one in reversed(self.trips[: trip.number]) if one.uses > 0 and one.here is None)
        self.fetch(next(away, trip))

    def fetch(self, trip: Trip) -> None:
        if trip.here is None:
            trip.here = torch.empty(trip.shape, dtype=trip.dtype, device=self.carrier.device)
            with self.carrier.copying():  # after the work that may still use this memory
                for part, piece in pairs(bytes_of(trip.here), trip.pieces):
                    part.copy_(piece, non_blocking=True)
            trip.copies = self.carrier.launched()


def activation_offload(model: nn.Module, settings: Settings, device: torch.device) -> Activations | None:
    """Returns the offload that the settings ask for. On a CPU there is nowhere to go."""
    wanted = settings.offload_activations and device.type != "cpu"
    return Activations(model, Carrier(device)) if wanted else None


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
