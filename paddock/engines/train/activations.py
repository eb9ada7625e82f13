"""What autograd keeps for backward waits in host memory: sequences of any length, with little of them on the device.

Hooks on saved tensors move them out while the forward goes on, and back while backward comes down, one ahead of need.
Under gradient checkpointing what is saved are the inputs of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from paddock.core.device import Carrier

LEAST = 1 << 20
"""Bytes of a tensor that is worth the way."""


class Activations:
    """Of one model's forwards. Its parameters stay where they are."""

    def __init__(self, model: nn.Module, carrier: Carrier, least: int = LEAST):
        self.model, self.carrier, self.least = model, carrier, least

    @contextmanager
    def away(self) -> Iterator[Journey]:
        """What a forward in this block saves is not on the device between then and its use."""
        journey = Journey(self.carrier, self.least, {param.untyped_storage().data_ptr() for param in self.stored()})
        with saved_tensors_hooks(journey.leave, journey.come_back):
            yield journey

    def stored(self) -> Iterator[Tensor]:
        """Sharded parameters have no one storage; their gathered form is known by its type."""
        yield from (param for param in self.model.parameters() if type(param.data) is Tensor)


class Trip:
    """One tensor on its way."""

    def __init__(self, number: int, host: Tensor):
        self.number, self.host = number, host
        self.uses = 0
        self.arrival: Any = None


class Journey:
    """The tensors that one forward saved, in its order."""

    def __init__(self, carrier: Carrier, least: int, at_home: set[int]):
        self.carrier, self.least, self.at_home = carrier, least, at_home
        self.trips: list[Trip] = []
        self.known: dict[Any, tuple[StorageWeakRef, Trip]] = {}

    def leave(self, tensor: Tensor) -> Tensor | Trip:
        """A tensor that is saved more than once travels once."""
        if not self.travels(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.dtype, tensor._version
        alive, trip = self.known.get(key, (None, None))
        if trip is None or alive is None or alive.expired():  # its memory may have become another's
            trip = Trip(len(self.trips), self.carrier.to_host(tensor.detach()))
            self.trips.append(trip)
            self.known[key] = StorageWeakRef(storage), trip
        trip.uses += 1
        return trip

    def travels(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter):
            return False
        large = tensor.nbytes >= self.least and tensor.is_contiguous()
        return large and tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in self.at_home

    def come_back(self, saved: Tensor | Trip) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.fetch(saved)
        if saved.number > 0 and self.trips[saved.number - 1].uses > 0:
            self.fetch(self.trips[saved.number - 1])  # the one that is asked for next
        tensor = self.carrier.arrived(saved.arrival)
        saved.uses -= 1
        if saved.uses <= 0:
            saved.arrival = None
        return tensor

    def fetch(self, trip: Trip) -> None:
        if trip.arrival is None:
            trip.arrival = self.carrier.to_device(trip.host)
