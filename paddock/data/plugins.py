"""Classes of the user's: rows from somewhere else than files, and an order of prompts other than a shuffle."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paddock.config.paths import files_of
from paddock.config.schema import DataConfig
from paddock.core.registry import suggest
from paddock.data.tables import Record, Table, open_tables
from paddock.errors import UserError
from paddock.facts.modules import blaming, user_module

ROWS, ORDER = "data.custom_cls", "data.sampler"
MEND = "mend the class"
MESSAGES = "raw_prompt"  # what data sets written for other trainers call the column of `data.prompt_key`


def tables_of(
    files: Any, tokenizer: Any, config: DataConfig, key: str, wanted: Callable[[list[str]], Sequence[str]]
) -> list[list[Table]]:
    """The tables of each data file, or what the user's data set makes of them all; of a file's columns the `wanted`
    ones are read."""
    paths = files_of(files)
    plugin = config.custom_cls
    if plugin.path is None:
        return [open_tables(path, key, wanted) for path in paths]
    found = class_at(plugin.path, plugin.name, ROWS, "name")
    given: dict[str, Any] = {"data_files": paths, "tokenizer": tokenizer, "processor": None, "config": config}
    parameters = inspect.signature(found).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        given = {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}
    rows = made(found, given, ROWS)
    for method in ("__len__", "__getitem__"):
        if not hasattr(rows, method):
            raise UserError(f"{found.__name__} has no {method}", key=f"{ROWS}.name", fix="a map-style torch Dataset")
    return [[CustomRows(f"{plugin.path}:{found.__name__}", rows, config.prompt_key)]]


class CustomRows(Table):
    """Items are rows as a file has them: `{"prompt": [...], "data_source": ..., "reward_model": {...}, ...}`."""

    def __init__(self, path: str, items: Any, prompt_key: str):
        super().__init__(path, [], 0)
        self.items, self.prompt_key = items, prompt_key
        with blaming("len() raised", f"{ROWS}.name", path, MEND):
            self.count = len(items)
        self.columns = sorted(self._row(0)) if self.count else []

    def __reduce__(self) -> Any:
        raise TypeError("other processes may not know the user's class")

    def rows(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        return [self._row(index) for index in indices]

    def digest(self) -> bytes:
        found = hashlib.sha256()
        for record in map(self._row, range(self.count)):
            found.update(json.dumps(record, sort_keys=True, default=str).encode())
        return found.digest()

    def _row(self, index: int) -> Record:
        with blaming(f"item {index} raised", f"{ROWS}.name", self.path, MEND):
            record = self.items[index]
        if not isinstance(record, dict):
            fix = 'an item is a row: {"prompt": [...], "data_source": ..., "reward_model": {...}}'
            raise UserError(f"item {index} is {record!r:.80}, not a dict", key=f"{ROWS}.name", value=self.path, fix=fix)
        renamed = MESSAGES in record and self.prompt_key not in record
        return {**record, self.prompt_key: record[MESSAGES]} if renamed else record


class Order:
    """The user's sampler: positions of prompts, epoch by epoch. The same epoch has the same order when it comes again.

    It is made with `data_source` and `data_config`, told the epoch by `set_epoch` if it has that, and finds torch's
    generator seeded by `data.seed` and the epoch.
    """

    def __init__(self, config: DataConfig, dataset: Any):
        self.seed, self.count = config.seed or 0, len(dataset)
        path = str(config.sampler.class_path)
        found = class_at(path, config.sampler.class_name, ORDER, "class_name")
        self.sampler = made(found, {"data_source": dataset, "data_config": config}, ORDER)
        self.name = f"{found.__name__} of {hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16]}"
        if callable(getattr(self.sampler, "update", None)):
            reason = f"{found.__name__} learns from batches by `update`, which is not called yet"
            fix = "an order that is known when an epoch begins"
            raise UserError(reason, key=f"{ORDER}.class_name", value=found.__name__, fix=fix)

    def __call__(self, epoch: int) -> list[int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(((self.seed << 20) + epoch) % 2**63)
            with blaming(f"epoch {epoch} raised", f"{ORDER}.class_name", self.name.split()[0], MEND):
                if hasattr(self.sampler, "set_epoch"):
                    self.sampler.set_epoch(epoch)
                found = [int(position) for position in self.sampler]
        wrong = next((position for position in found if not 0 <= position < self.count), None)
        if wrong is not None or not found:
            what = "no position" if not found else f"position {wrong}, and there are {self.count} prompts"
            fix = f"positions from 0 to {self.count - 1}"
            raise UserError(f"the sampler gave {what}", key=f"{ORDER}.class_name", value=self.name.split()[0], fix=fix)
        return found


def made(found: type, arguments: dict[str, Any], section: str) -> Any:
    fix = "mend the class; these are the arguments that it is given"
    with blaming(f"{found.__name__}({', '.join(arguments)}) raised", section, None, fix):
        return found(**arguments)


def class_at(path: str, name: str | None, section: str, last: str) -> type:
    """Returns the class of this name in the user's file."""
    key = f"{section}.{last}"
    module = user_module(path, f"{section}.{last.replace('name', 'path')}", path)
    classes = {n: c for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__}
    if name is None or name not in classes:
        fix = suggest(name or "", sorted(classes)) if classes else f"define one in {path}"
        raise UserError(f"is no class of {path}", key=key, value=name, fix=fix)
    return classes[name]
