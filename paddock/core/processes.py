"""The process group of a training run: how its ranks find each other, and small agreements between them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paddock.core.device import collective_backend


@dataclass(frozen=True)
class Rendezvous:
    """The rank of a process among those that train together, and the store through which they find each other."""

    rank: int = 0
    size: int = 1
    store: tuple[str, int] | None = None
    """Host and port of a `TCPStore` that another process keeps; None: for a process by itself."""
    name: str = "ranks"
    """Tells this meeting from others in the same store."""
    timeout: float = 600.0
    """Seconds until a collective counts as hung."""


def join(rendezvous: Rendezvous, device: torch.device) -> None:
    """Returns once every rank has come."""
    limit = timedelta(seconds=rendezvous.timeout)
    if rendezvous.store is None or rendezvous.store[0].startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # a connection of its own: a wait holds it
    store = dist.TCPStore(*rendezvous.store, is_master=False, timeout=limit) if rendezvous.store else dist.HashStore()
    dist.init_process_group(
        collective_backend(device.type),
        store=dist.PrefixStore(rendezvous.name, store),
        rank=rendezvous.rank,
        world_size=rendezvous.size,
        timeout=limit,
    )


def subgroups(size: int) -> dist.ProcessGroup:
    """This rank's group, where neighbours form groups of `size`. Every rank must call it."""
    group, _ = dist.new_subgroups(size)
    assert group is not None
    return group


def is_first() -> bool:
    """True for rank 0, and for a process by itself."""
    return not dist.is_initialized() or dist.get_rank() == 0


def largest(number: int, device: torch.device) -> int:
    """The largest that any rank has."""
    box = torch.tensor(number, dtype=torch.long, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box)


def from_everyone(thing: Any) -> list[Any]:
    """Returns what every rank gives, in the order of ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found
