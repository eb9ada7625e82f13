"""What a step is made of: prompts, rows, mini-batches, micro-batches, optimizer steps, and how many steps a run has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddock.config import tree
from paddock.config.paths import BUILTIN, files_of, missing_file
from paddock.config.schema import Config, DataConfig, row_tokens
from paddock.config.topology import (
    data_parallel_size,
    engine_size,
    model_parallel_size,
    pools,
    roles_of,
    splits_models,
)
from paddock.data.builtin import builtin_count
from paddock.errors import UserError
from paddock.facts.datasets import known_dataset
from paddock.facts.files import count_rows, hub_name


@dataclass(frozen=True)
class DataFile:
    """One data file and how many rows it has, as far as that is known."""

    path: str
    rows: int | None
    here: bool
    prepare: str | None = None  # the command that makes it

    @property
    def note(self) -> str | None:
        if self.here:
            return None
        make = f"; make it with: {self.prepare}" if self.prepare else ""
        return f"{self.path} is not on this machine{make}"


@dataclass(frozen=True)
class BatchPlan:
    prompts: int  # per step
    responses: int  # per prompt
    rows: int  # per step
    mini_batches: int  # per pass over the rows
    optimizer_steps: int  # of the actor, per step
    rows_per_device: int
    micro_batches: str  # how a mini-batch is cut for one device
    train_rows: int | None
    steps_per_epoch: int | None
    total_steps: int | None


def data_files(data: DataConfig, split: str, strict: bool = True) -> list[DataFile]:
    """Returns the files of data.train_files or data.val_files. One that is neither here nor publicly known is an error
    if `strict`, else its rows are not known; nor are those that a user's data set makes of it."""
    key = f"data.{split}_files"
    paths = files_of(getattr(data, f"{split}_files"))
    if data.custom_cls.path:
        return [DataFile(path, None, here=path.startswith(BUILTIN) or os.path.exists(path)) for path in paths]
    return [_data_file(key, path, strict) for path in paths]


def _data_file(key: str, path: str, strict: bool) -> DataFile:
    if path.startswith(BUILTIN):
        return DataFile(path, builtin_count(path), here=True)
    if os.path.exists(path):
        return DataFile(path, count_rows(path, key=key), here=True)
    if hub_name(path):
        return DataFile(path, None, here=True)
    known = known_dataset(path)
    if known is None and strict:
        raise missing_file(key, path, "check the path; to plan without the data, add --rows N")
    return DataFile(path, known.rows, False, known.prepare_command) if known else DataFile(path, None, False)


def require_files(data: DataConfig, splits: Sequence[str] = ("train", "val")) -> None:
    """Before a run: every data file is here and holds rows."""
    for split in splits:
        for file in data_files(data, split, strict=False):
            if not file.here:
                fix = f"make it: {file.prepare}" if file.prepare else None
                raise missing_file(f"data.{split}_files", file.path, fix)
            if file.rows == 0:
                fix = "write it again, or leave it out"
                raise UserError("holds no rows", key=f"data.{split}_files", value=file.path, fix=fix)


def batch_plan(config: Config, train_files: list[DataFile], assumed_rows: int | None = None) -> BatchPlan:
    actor, trainer, data = config.actor_rollout_ref.actor, config.trainer, config.data
    n = config.actor_rollout_ref.rollout.n
    rows = data.train_batch_size * n
    train_rows = assumed_rows if assumed_rows is not None else _total(train_files, data.train_max_samples)
    per_epoch = None if train_rows is None else train_rows // data.train_batch_size
    if per_epoch == 0:
        reason = f"the training files hold only {train_rows} rows, less than one batch"
        key = "data.train_batch_size"
        raise UserError(reason, key=key, value=data.train_batch_size, fix=f"at most {train_rows}")
    total = trainer.steps(per_epoch) if per_epoch else trainer.total_training_steps
    mini_batches = data.train_batch_size // actor.ppo_mini_batch_size
    devices = data_parallel_size(config, actor)
    return BatchPlan(
        prompts=data.train_batch_size,
        responses=n,
        rows=rows,
        mini_batches=mini_batches,
        optimizer_steps=mini_batches * actor.ppo_epochs,
        rows_per_device=rows // devices,
        micro_batches=_micro_batches(config, actor.ppo_mini_batch_size * n // devices),
        train_rows=train_rows,
        steps_per_epoch=per_epoch,
        total_steps=total,
    )


def _total(files: list[DataFile], most: int) -> int | None:
    counts = [file.rows for file in files]
    if not counts or any(count is None for count in counts):
        return None
    total = sum(count for count in counts if count is not None)
    return min(total, most) if most > 0 else total


def _micro_batches(config: Config, rows: int) -> str:
    """Describes the micro-batches of one device for one mini-batch."""
    actor, data = config.actor_rollout_ref.actor, config.data
    if actor.use_dynamic_bsz:
        most = -(-rows // max(1, actor.ppo_max_token_len_per_gpu // row_tokens(data)))
        fewer = " or fewer" if most > 1 else ""
        return f"{rows} rows, at most {actor.ppo_max_token_len_per_gpu} tokens each: {most}{fewer}"
    size = actor.ppo_micro_batch_size_per_gpu or rows
    return f"{rows} rows, {size} each: {-(-rows // size)}"


def roles(config: Config) -> list[dict[str, Any]]:
    """Returns the devices of each role: roles share those of one pool, but for those that have one of their own."""
    table = list[dict[str, Any]]()
    devices = {name: pool.size for pool in pools(config) for name in pool.roles}

    def held(role: str, engine: str | None, devices: int, rows: int, weights: int) -> None:
        table.append({"role": role, "engine": engine, "devices": devices, "rows_split": rows, "weights_split": weights})

    for role in roles_of(config):
        keys, size = role.keys(config), devices[role.name]
        if role.name == "rollout":
            held(role.name, keys.name, size, size // engine_size(config), engine_size(config))
        elif role.whole:
            held(role.name.replace("_", " "), keys.strategy, size, size, size)
        else:
            megatron, shards = splits_models(keys), tree.get(config, role.fsdp).fsdp_size
            weights = size if shards < 1 else min(shards, size)
            if megatron:
                weights = keys.megatron.tensor_model_parallel_size * keys.megatron.pipeline_model_parallel_size
            engine = "single" if size == 1 and not megatron else keys.strategy
            for name in role.models(config):
                held(name, engine, size, max(1, size // model_parallel_size(keys)), weights)
    return table
