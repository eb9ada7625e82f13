"""The files of a model's folder, checked before transformers reads them: what is damaged is named, with the reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from paddock.errors import UserError

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
LARGE_FILE_POINTER = b"version https://git-lfs"
AGAIN = "download the model again"


@dataclass(frozen=True)
class ModelPath:
    """The path or name of a model as the user gave it, and the key that names it: what errors of its files show."""

    path: str
    key: str

    def wrong(self, reason: str, fix: str = AGAIN) -> UserError:
        return UserError(reason, key=self.key, value=self.path, fix=fix)


def weight_files(folder: Path, asked: ModelPath) -> list[Path]:
    """Returns the files with the weights, which are there. safetensors come before pickles, as in transformers."""
    for name in (WEIGHTS, PICKLED):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}{INDEX}").is_file():
            return shards_of(folder / f"{name}{INDEX}", asked)
    held = ", ".join(sorted(entry.name for entry in folder.iterdir()))
    raise asked.wrong(f"the folder has no weights ({WEIGHTS} or {PICKLED}): it holds {held}")


def shards_of(index: Path, asked: ModelPath) -> list[Path]:
    """Returns the files that an index names; they lie beside it."""
    listed = read_json(index, asked)
    shards = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise asked.wrong(f"{index.name} has no weight_map of file names")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if not (index.parent / name).is_file():
            raise asked.wrong(f"{index.name} names {name}, which is not in the folder")
    return [index.parent / name for name in names]


def check_weights(folder: Path, asked: ModelPath) -> list[Path]:
    """Returns `weight_files`, of which those in safetensors have a header that describes the whole file."""
    files = weight_files(folder, asked)
    for file in files:
        if file.suffix == Path(WEIGHTS).suffix and (problem := damage_of(file)):
            raise asked.wrong(f"{file.name} is damaged: {problem}")
    return files


def damage_of(file: Path) -> str | None:
    """Returns why safetensors cannot read a file; None if it can."""
    try:
        with file.open("rb") as stream:
            if stream.read(len(LARGE_FILE_POINTER)) == LARGE_FILE_POINTER:
                return "it is a pointer of git-lfs; `git lfs pull` brings the file itself"
        with safe_open(file, "pt"):
            return None
    except (OSError, SafetensorError) as error:
        return f"{error}; it has {file.stat().st_size} bytes"


def read_json(file: Path, asked: ModelPath) -> Any:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        reason = error.strerror
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise asked.wrong(f"{file.name} cannot be read as JSON: {reason}")


def check_json(folder: Path, names: tuple[str, ...], asked: ModelPath) -> None:
    """Refuses files of these names that hold no JSON object; they may be missing."""
    for file in (folder / name for name in names):
        if file.is_file() and not isinstance(read_json(file, asked), dict):
            raise asked.wrong(f"{file.name} holds no JSON object")
