"""Weights that verl's FSDP checkpoints hold in one file a rank, joined as whole tensors."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paddock.errors import UserError

NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
REPLICAS = ("dp", "ddp")
"""Names of a mesh's first dimension if its ranks hold copies."""


def shard_files(folder: Path) -> dict[int, Path]:
    """Returns the files of the model by rank; empty if the folder holds none."""
    return {int(match[2]): file for file in folder.iterdir() if (match := NAME.fullmatch(file.name))}


def merged_shards(folder: Path, key: str) -> dict[str, Tensor]:
    """Returns the whole weights of a folder with one file a rank. `key` names the folder in errors."""
    files = shard_files(folder)
    world = max(int(match[1]) for file in files.values() if (match := NAME.fullmatch(file.name)))
    if missing := sorted(set(range(world)) - set(files)):
        reason = f"the files of {len(missing)} of {world} ranks are missing, the first of rank {missing[0]}"
        raise UserError(reason, key=key, value=folder, fix="copy the files of every rank into the folder")
    first = read_shard(files[0], key)
    ranks = range(1, shards_of(first))
    others = [read_shard(files[rank], key) for rank in ranks]
    return {name: joined(name, [part[name] for part in (first, *others)], key) for name in first}


def read_shard(file: Path, key: str) -> dict[str, Any]:
    """Reads one file: tensors and DTensors alone. A pickle that would run code is refused."""
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        reason = f"cannot be read as weights: {str(error).splitlines()[0]}"
        fix = "check that the file is whole, and of an FSDP model"
        raise UserError(reason, key=key, value=file, fix=fix) from error
    return dict(weights)


def shards_of(weights: dict[str, Any]) -> int:
    """Returns how many ranks hold one copy of the weights."""
    mesh = next((tensor.device_mesh for tensor in weights.values() if isinstance(tensor, DTensor)), None)
    return 1 if mesh is None else int(mesh.mesh.shape[-1])


def joined(name: str, parts: list[Any], key: str) -> Tensor:
    """Returns one weight of all ranks: cut along a dimension, or the same on each."""
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    names, placements = first.device_mesh.mesh_dim_names or (), first.placements
    placements = placements[1:] if names and names[0] in REPLICAS and len(placements) > 1 else placements
    if len(placements) != 1 or placements[0].is_partial():
        reason = f"{name} is split over a mesh of {names}, and only one dimension is joined"
        raise UserError(reason, key=key, fix="merge it with the version of verl that wrote it")
    if placements[0].is_replicate():
        return first.to_local()
    return torch.cat([part.to_local() for part in parts], dim=placements[0].dim)  # type: ignore[attr-defined]
