"""Checkpoints of weights that are spread over ranks, in a format that any number of ranks reads.

`torch.distributed.checkpoint` writes each rank's part of every tensor once, under the tensor's name, and gives whoever
reads just the parts that are asked for. Beside that, rank 0 writes the model as `transformers` loads it.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from paddock.core.processes import is_first
from paddock.engines.train.checkpoints import another_model
from paddock.engines.train.optim import Updater
from paddock.models.value_head import HEAD_FILE

HEAD, BACKBONE = "value_head.", "backbone."
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
STAGED = 2 << 30
"""Bytes of weights that rank 0 holds at most before it writes them, but for one layer."""


def save_shards(folder: Path, weights: Mapping[str, Tensor], updater: Updater) -> None:
    """Writes the shards that this rank holds; every rank must call it."""
    state: dict[str, Any] = {f"model/{name}": tensor for name, tensor in weights.items()}
    state["step"] = updater.step_no
    for name, master in updater.named_masters().items():
        for field, value in updater.optimizer.state.get(master, {}).items():
            state[f"optimizer/{name}/{field}"] = value
    dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())


@torch.no_grad()
def load_shards(folder: Path, weights: Mapping[str, Tensor], updater: Updater | None) -> None:
    """Reads into these tensors, whole or in shards, and into the optimizer."""
    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    require_same_model(folder, known, weights)
    state: dict[str, Any] = {f"model/{name}": tensor for name, tensor in weights.items()}
    fields: dict[str, dict[str, Tensor]] = {}
    if updater is not None:
        state["step"] = 0
        for name, master in updater.named_masters().items():
            fields[name] = optimizer_fields(f"optimizer/{name}/", known, master, updater.number_device(master))
            state |= {f"optimizer/{name}/{field}": value for field, value in fields[name].items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    if updater is not None:
        updater.step_no = state["step"]
        for name, master in updater.named_masters().items():
            updater.optimizer.state[master] = fields[name]


def optimizer_fields(prefix: str, known: Mapping[str, Any], master: Tensor, numbers: torch.device) -> dict[str, Tensor]:
    """Allocates what the optimizer keeps of a weight: tensors of the weight's own shape, or a number, on `numbers`."""
    fields: dict[str, Tensor] = {}
    for key, what in known.items():
        if key.startswith(prefix) and isinstance(what, TensorStorageMetadata):
            dtype = what.properties.dtype
            whole = what.size == master.shape
            room = torch.zeros_like(master, dtype=dtype) if whole else torch.zeros(what.size, device=numbers)
            fields[key.removeprefix(prefix)] = room
    return fields


def require_same_model(folder: Path, known: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    stored = {key.removeprefix("model/"): what for key, what in known.items() if key.startswith("model/")}
    strange = sorted(stored.keys() ^ weights.keys())
    strange += [name for name, tensor in weights.items() if name in stored and stored[name].size != tensor.shape]
    if strange:
        raise another_model(folder.parent, strange)


@torch.no_grad()
def copy_into(target: Tensor, whole: Tensor) -> None:
    """Copies this rank's shard of a tensor, or all of it."""
    if isinstance(target, DTensor):
        part = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(whole)


def save_streamed(
    folder: Path, model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], writes: bool, staged: int = STAGED
) -> None:
    """Writes what `model.save_pretrained` would write, from tensors that are gathered one after the other.

    Every rank takes part in gathering; one writes, a few layers at a time. Cuts fall between layers: `transformers`
    joins or splits tensors of a layer when it writes some families.
    """
    parts: list[Path] = []
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        if not writes:
            continue
        full = sum(other.nbytes for other in waiting.values()) + tensor.nbytes > staged
        if full and layer_of(name) not in map(layer_of, waiting):
            parts.append(write_part(folder, model, waiting, len(parts)))
            waiting = {}
        waiting[name] = tensor.to("cpu").contiguous()
    if writes:
        join_parts(folder, [*parts, write_part(folder, model, waiting, len(parts))])


def save_gathered(
    folder: Path, model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], critic: bool = False
) -> None:
    """Writes gathered weights on rank 0 as `transformers` loads them, the value head of a critic beside them."""
    folder.mkdir(exist_ok=True)
    head: dict[str, Tensor] = {}

    def backbone() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if critic and name.startswith(HEAD):
                head[name.removeprefix(HEAD)] = tensor.cpu()
            else:
                yield name.removeprefix(BACKBONE) if critic else name, tensor

    save_streamed(folder, model, backbone(), is_first())
    if is_first() and head:
        save_file(head, folder / HEAD_FILE)


def layer_of(name: str) -> str:
    """Returns a name up to its first number: layers.17."""
    words = name.split(".")
    number = next((i for i, word in enumerate(words) if word.isdigit()), len(words) - 2)
    return ".".join(words[: number + 1])


def write_part(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor], number: int) -> Path:
    part = folder / f".part-{number}"
    model.save_pretrained(part, state_dict=weights, max_shard_size="1000TB")
    return part


def join_parts(folder: Path, parts: list[Path]) -> None:
    """Moves the files together, with the names and the index that `transformers` gives to a model in several files."""
    for extra in parts[0].iterdir():
        if extra.name != WEIGHTS_FILE:
            os.replace(extra, folder / extra.name)
    if len(parts) == 1:
        os.replace(parts[0] / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    else:
        places, size = {}, 0
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05}-of-{len(parts):05}.safetensors"
            os.replace(part / WEIGHTS_FILE, folder / file)
            size += (folder / file).stat().st_size
            with safe_open(folder / file, "pt") as opened:
                places.update(dict.fromkeys(opened.keys(), file))
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for part in parts:
        shutil.rmtree(part)
