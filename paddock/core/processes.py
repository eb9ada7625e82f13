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
    """The rank of a process among those that train together, and the address where they meet."""

    rank: int
    size: int
    address: str
    """``host:port`` of rank 0."""
    timeout: float = 600.0
    """Seconds until a collective counts as hung."""


def join(rendezvous: Rendezvous, device: torch.device) -> None:
    """Returns once every rank has come."""
    if rendezvous.address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        collective_backend(device.type),
        init_method=f"tcp://{rendezvous.address}",
        rank=rendezvous.rank,
        world_size=rendezvous.size,
        timeout=timedelta(seconds=rendezvous.timeout),
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
