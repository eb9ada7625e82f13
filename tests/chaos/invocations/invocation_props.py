"""What bad invocations find in their folder: data files, models, checkpoints, scripts, each damaged in one way."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invocation import ROOT, Maker

TINY = ROOT / "paddock" / "assets" / "tiny"
TRUTH = {"style": "rule", "ground_truth": "64"}
ROW = {"data_source": "paddock/addition", "prompt": "12+34=", "reward_model": TRUTH, "extra_info": {"index": 0}}
PAIR = {"prompt": "12+34=", "chosen": "64", "rejected": "65"}
ANSWERED = {"prompt": "12+34=", "answer": "64"}


def text(name: str, content: str | bytes) -> Maker:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def empty_folder(name: str) -> Maker:
    return lambda folder: (folder / name).mkdir(parents=True)


def link(name: str, target: str) -> Maker:
    return lambda folder: (folder / name).symlink_to(target)


@dataclass(frozen=True)
class closed:
    """Takes the permissions of a file or folder away."""

    name: str
    mode: int = 0

    def __call__(self, folder: Path) -> None:
        (folder / self.name).chmod(self.mode)


def lines(name: str, *rows: Any) -> Maker:
    return text(name, "".join(json.dumps(row) + "\n" for row in rows))


def rows(name: str, count: int = 8, **changes: Any) -> Maker:
    """Rows of the built-in task, each with these columns changed; a column that is `...` is left out."""
    return lines(name, *[changed(ROW, **changes) for _ in range(count)])


def changed(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**row, **changes}.items() if value is not ...}


def parquet(name: str, *records: dict[str, Any]) -> Maker:
    def make(folder: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet as files

        files.write_table(pa.Table.from_pylist(list(records)), folder / name)

    return make


def truncated(name: str, keep: float = 0.5) -> Maker:
    def make(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return make


def zipped(name: str, content: bytes) -> Maker:
    return text(name, gzip.compress(content))


# Models


def model(name: str = "model", *damage: Callable[[Path], object]) -> Maker:
    """A copy of the embedded model, damaged."""

    def make(folder: Path) -> None:
        shutil.copytree(TINY, folder / name)
        for harm in damage:
            harm(folder / name)

    return make


def without(*names: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return harm


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: text(name, content)(folder)


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    """Changes fields of a JSON file; `...` removes one."""

    def harm(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(changed(values, **changes)))

    return harm


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Writes the weights again after `change` has been at them."""

    def harm(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return harm


def as_shards(index: Any) -> Callable[[Path], None]:
    """Renames the weights to a shard, with an index file of this content."""

    def harm(folder: Path) -> None:
        os.rename(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
        content = index if isinstance(index, str) else json.dumps(index)
        (folder / "model.safetensors.index.json").write_text(content)

    return harm


def pickled(weights: Callable[[], Any]) -> Callable[[Path], None]:
    """Weights as pytorch_model.bin in place of safetensors."""

    def harm(folder: Path) -> None:
        import torch

        (folder / "model.safetensors").unlink()
        torch.save(weights(), folder / "pytorch_model.bin")

    return harm


class Harmful:
    """What a pickle could do; `weights_only` refuses it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


def header(length: int, content: bytes = b"") -> bytes:
    """The beginning of a safetensors file: how long its header claims to be, and the header."""
    return struct.pack("<Q", length) + content


# Checkpoints


def checkpoint(step: int = 1, *damage: Callable[[Path], object]) -> Maker:
    """A store `run` with one whole checkpoint of the embedded model, then damaged."""

    def make(folder: Path) -> None:
        from paddock.runs.checkpoint import CheckpointStore

        store = CheckpointStore(folder / "run")
        with store.write(step) as writing:
            shutil.copytree(TINY, writing / "actor")
        for harm in damage:
            harm(store.folder(step))

    return make
