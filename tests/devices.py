"""The device on which tests of several ranks compute: a CPU, or, by `make test-nccl`, one GPU that all ranks share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from paddock.core.processes import Rendezvous, join

DEVICE = torch.device(os.environ.get("PADDOCK_TESTS_DEVICE", "cpu"))


def on_host(values: Any) -> Any:
    """Copies the tensors in lists, tuples and dicts to the host."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), values)


@contextmanager
def joined(rendezvous: Rendezvous, device: torch.device) -> Iterator[None]:
    join(rendezvous, device)
    try:
        yield
    finally:
        dist.destroy_process_group()


FLOAT32 = [
    f"{role}.dtype=float32"
    for role in ("actor_rollout_ref.rollout", "actor_rollout_ref.actor.fsdp_config",
                 "actor_rollout_ref.ref.fsdp_config", "critic.model.fsdp_config")
]  # fmt: skip
ON_DEVICE = (
    ["trainer.device=cpu"]
    if DEVICE.type == "cpu"
    else [f"trainer.device={DEVICE.type}", "trainer.ranks_per_device=16", "trainer.n_gpus_per_node=1", *FLOAT32]
)
"""Keys of a run on that device, which on a GPU computes in float32, with memory left for runs of other test files."""
