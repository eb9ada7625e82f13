"""The trainer's own part of a checkpoint: all that is not weights."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paddock.errors import UserError

READABLE, BINARY = "trainer_state.json", "trainer_state.pt"


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Saves what JSON returns unchanged in a readable file, tensors and the rest in one that runs no code."""
    readable = {name: value for name, value in state.items() if survives_json(value)}
    rest = {name: value for name, value in state.items() if name not in readable}
    (folder / READABLE).write_text(json.dumps(readable, indent=1))
    torch.save(rest, folder / BINARY)
    torch.load(folder / BINARY, weights_only=True)  # an entry that could not be read back must fail now


def load_state(folder: Path) -> dict[str, Any]:
    """Loads what `save_state` wrote into a checkpoint that is whole; another program's checkpoint has no such files."""
    try:
        return json.loads((folder / READABLE).read_text()) | torch.load(folder / BINARY, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(
            f"is no checkpoint of a training run: there is no {Path(str(error.filename)).name}",
            key="trainer.default_local_dir",
            value=folder,
            fix="another folder for this run; or trainer.resume_mode=disable",
        ) from error


def survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def rng_state() -> dict[str, Any]:
    """Returns the state of this process's generators: Python's, numpy's, torch's on the CPU. Engines keep those of
    their devices."""
    numpy = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def restore_rng(state: Mapping[str, Any]) -> None:
    inner = state["numpy"]["state"]
    random.setstate(state["python"])
    np.random.set_state(state["numpy"] | {"state": inner | {"key": np.array(inner["key"], dtype=np.uint32)}})
    torch.set_rng_state(state["torch"])
