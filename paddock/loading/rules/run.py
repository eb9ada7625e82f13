"""Rules on a run: its loggers and checkpoints, its files and plug-ins."""

from __future__ import annotations

import os
from collections.abc import Iterator

from paddock.config import tree
from paddock.config.loggers import LOGGERS
from paddock.config.paths import files_of, missing_file
from paddock.config.rewards import absent_files
from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.loading.rules.form import Breach, rule
from paddock.loading.rules.limits import unknown


@rule
def loggers_are_known(config: Config) -> None:
    value = config.trainer.logger
    for name in value if isinstance(value, list) else [value]:
        if str(name) not in LOGGERS:
            raise unknown("logger", "trainer.logger", str(name), LOGGERS)


@rule
def resume_path_is_a_step(config: Config) -> Iterator[Breach]:
    trainer, key = config.trainer, "trainer.resume_from_path"
    if trainer.resume_mode == "resume_path" and "global_step_" not in str(trainer.resume_from_path):
        yield key, "resume_mode=resume_path needs the folder of a step", f"{key}=checkpoints/.../global_step_N"


PARTS = ("model", "optimizer", "extra")
"""Parts of a checkpoint: with less, a run would not go on as if it had not stopped."""


@rule
def checkpoints_are_read_whole(config: Config) -> Iterator[Breach]:
    for role in ("actor_rollout_ref.actor", "critic"):
        read = tree.get(config, key := f"{role}.checkpoint.load_contents")
        if read is not None and (missing := set(PARTS) - set(read)):
            fix = f"{key}=[{','.join(PARTS)}]; to start anew from its weights: `paddock export`"
            yield key, f"a checkpoint is read whole, and {min(missing)} is left out", fix


@rule
def files_are_named_by_paths(config: Config) -> Iterator[Breach]:
    for key in ("data.train_files", "data.val_files"):
        value = tree.get(config, key)
        if not all(isinstance(path, str) for path in (value if isinstance(value, list) else [value or ""])):
            yield key, "is not a path or a list of paths", f"{key}=['a.parquet','b.parquet']"


@rule
def weights_suit_the_files(config: Config) -> Iterator[Breach]:
    data, key, files = config.data, "data.train_weights", files_of(config.data.train_files)
    if data.train_weights is None:
        return
    if len(data.train_weights) != len(files):
        reason = f"there are {len(files)} in data.train_files and {len(data.train_weights)} weights"
        yield key, reason, f"{key}=[{','.join('1' for _ in files)}]"
    if any(not weight > 0 for weight in data.train_weights):
        yield key, "a weight must be above 0", "leave a file out of data.train_files instead"
    for other in ("data.sampler.class_path", "data.custom_cls.path"):
        if tree.get(config, other):
            reason = f"{other} decides which rows come, and in which order"
            yield key, reason, f"leave one of the two out: ~{key}"


def absent_plugins(config: Config) -> Iterator[UserError]:
    """Yields the Python files of a run that are not here."""
    for path in absent_files(config):
        yield missing_file("custom_reward_function.path", path)
    for key in ("data.custom_cls.path", "data.sampler.class_path"):
        path = tree.get(config, key)
        if path and not path.startswith("pkg://") and not os.path.isfile(path):
            yield missing_file(key, path)
