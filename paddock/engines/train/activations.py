"""Offload of activations: what autograd saves for backward waits in host memory, so that long sequences fit.

Hooks on saved tensors copy them out while the forward goes on, and back while backward runs, some ahead of their use.
Under gradient checkpointing the saved tensors are the inputs of the layers.
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

from paddock.core.device import CopyStream
from paddock.engines.train.offload import parts_of
from paddock.engines.train.settings import Settings

LEAST = 1 << 20
"""Bytes of the smallest tensor that is offloaded."""
PIECE = 1 << 24
"""Bytes of pinned memory that are asked for at a time: tensors of all sizes wait in pieces of one."""
BEHIND = 2
"""Tensors whose copy may still run while the forward goes on, and that are fetched before backward needs them."""


class Activations:
    """Offloads the tensors that forwards of one model save. The model's parameters stay on the device."""

    def __init__(self, model: nn.Module, copy_stream: CopyStream, least: int = LEAST):
        self.model, self.copy_stream, self.least = model, copy_stream, least
        self.free: list[Tensor] = []
        """Pinned memory that holds no tensor: forwards after the first find what they need here."""

    @contextmanager
    def offloaded(self) -> Iterator[SavedTensors]:
        """Keeps what a forward in this block saves on the host between the forward and its use in backward.

        Sharded parameters have no one storage; their gathered form is known by its type.
        """
        params = (param for param in self.model.parameters() if type(param.data) is Tensor)
        parameter_storages = {param.untyped_storage().data_ptr() for param in params}
        saved = SavedTensors(self.copy_stream, self.free, self.least, parameter_storages)
        with saved_tensors_hooks(saved.save, saved.restore):
            yield saved


class SavedTensor:
    """Holds one tensor that a forward saved, on the host or on the device."""

    def __init__(self, number: int, tensor: Tensor, pieces: list[Tensor]):
        self.number, self.pieces = number, pieces
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.on_device: Tensor | None = tensor
        """The tensor on the device, while its copy to the host runs and after its copy back was launched."""
        self.copies: Any = None
        """Copies that the work must wait for before it reads this memory, or before the memory is given away."""
        self.uses = 0


class SavedTensors:
    """Holds the tensors that one forward saved, in its order."""

    def __init__(self, copy_stream: CopyStream, free: list[Tensor], least: int, parameter_storages: set[int]):
        self.copy_stream, self.free, self.least = copy_stream, free, least
        self.parameter_storages = parameter_storages
        self.tensors: list[SavedTensor] = []
        self.leaving: deque[SavedTensor] = deque()
        self.known: dict[Any, tuple[StorageWeakRef, SavedTensor]] = {}

    def save(self, tensor: Tensor) -> Tensor | SavedTensor:
        """Starts the copy of a tensor to the host, once for a tensor that is saved more than once."""
        if not self.moves(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.dtype, tensor._version
        alive, saved = self.known.get(key, (None, None))
        if saved is None or alive is None or alive.expired():  # its memory may have become another's
            saved = self.send(tensor.detach())
            self.known[key] = StorageWeakRef(storage), saved
        saved.uses += 1
        return saved

    def moves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter):
            return False
        large = tensor.nbytes >= self.least and tensor.is_contiguous()
        own = tensor.untyped_storage().data_ptr() not in self.parameter_storages
        return large and tensor.is_floating_point() and own

    def send(self, tensor: Tensor) -> SavedTensor:
        """Starts the copy to the host. The host launches the forward far ahead of the device, so the forward waits for
        copies that are too far behind: else every layer would take new memory before the first was freed."""
        count = -(-tensor.nbytes // PIECE)
        pieces = [self.free.pop() if self.free else self.copy_stream.host(PIECE) for _ in range(count)]
        saved = SavedTensor(len(self.tensors), tensor, pieces)
        weakref.finalize(saved, self.free.extend, pieces)  # copies follow each other, so the next may be launched
        with self.copy_stream.copying():
            for part, piece in parts_of(bytes_of(tensor), pieces):
                piece.copy_(part, non_blocking=True)
        saved.copies = self.copy_stream.launched()
        self.tensors.append(saved)
        self.leaving.append(saved)
        while len(self.leaving) > BEHIND:
            gone = self.leaving.popleft()
            self.copy_stream.wait(gone.copies)
            gone.on_device = None
        return saved

    def restore(self, saved: Tensor | SavedTensor) -> Tensor:
        """Returns a saved tensor to backward. Copies it from the host first, unless it is still or already on the
        device."""
        if isinstance(saved, Tensor):
            return saved
        self.leaving.clear()
        self.fetch(saved)
        if saved.uses == 1:  # a tensor that every layer reads does not tell which layer backward has reached
            self.fetch_before(saved)
        self.copy_stream.wait(saved.copies)
        tensor = saved.on_device
        assert tensor is not None
        saved.uses -= 1
        if saved.uses <= 0:
            saved.on_device = None
        return tensor

    def fetch_before(self, saved: SavedTensor) -> None:
        """Fetches one tensor for each that is used up, so that as many are ahead as when backward began."""
        earlier = reversed(self.tensors[: saved.number])
        self.fetch(next((one for one in earlier if one.uses > 0 and one.on_device is None), saved))

    def fetch(self, saved: SavedTensor) -> None:
        if saved.on_device is None:
            saved.on_device = torch.empty(saved.shape, dtype=saved.dtype, device=self.copy_stream.device)
            with self.copy_stream.copying():  # after the work that may still use this memory
                for part, piece in parts_of(bytes_of(saved.on_device), saved.pieces):
                    part.copy_(piece, non_blocking=True)
            saved.copies = self.copy_stream.launched()


def activation_offload(model: nn.Module, settings: Settings, device: torch.device) -> Activations | None:
    """Returns the offload that the settings ask for. On a CPU there is nowhere to go."""
    wanted = settings.offload_activations and device.type != "cpu"
    return Activations(model, CopyStream(device)) if wanted else None


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
