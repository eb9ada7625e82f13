"""Rules on data files and the plug-ins that read them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from paddock.config import tree
from paddock.config.paths import files_of, missing_file
from paddock.config.rewards import absent_files
from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.loading.rules.form import rule


@rule
def row_limits_are_positive_or_off(config: Config) -> None:
    for name in ("train_max_samples", "val_max_samples"):
        most = getattr(config.data, name)
        if most < 1 and most != -1:
            raise UserError("is not a number of rows", key=f"data.{name}", value=most, fix="-1 for all, or at least 1")


@rule
def data_files_are_named(config: Config) -> None:
    for key in ("data.train_files", "data.val_files"):
        value = tree.get(config, key)
        paths = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(path, str) for path in paths):
            raise UserError(
                "is not a path or a list of paths", key=key, value=value, fix=f"{key}=['a.parquet','b.parquet']"
            )


@rule
def weights_suit_the_files(config: Config) -> None:
    data, key = config.data, "data.train_weights"
    if data.train_weights is None:
        return
    files = files_of(data.train_files)
    if len(data.train_weights) != len(files):
        reason = f"there are {len(files)} in data.train_files and {len(data.train_weights)} weights"
        raise UserError(reason, key=key, value=data.train_weights, fix=f"{key}=[{','.join('1' for _ in files)}]")
    if any(not weight > 0 for weight in data.train_weights):
        reason = "a weight must be above 0"
        raise UserError(reason, key=key, value=data.train_weights, fix="leave a file out of data.train_files instead")
    for other in ("data.sampler.class_path", "data.custom_cls.path"):
        if tree.get(config, other):
            reason = f"{other} decides which rows come, and in which order"
            raise UserError(reason, key=key, value=data.train_weights, fix=f"leave one of the two out: ~{key}")


def absent_plugins(config: Config) -> Iterator[UserError]:
    """Yields the Python files of a run that are not here."""
    for path in absent_files(config):
        yield missing_file("custom_reward_function.path", path)
    for key in ("data.custom_cls.path", "data.sampler.class_path"):
        path = tree.get(config, key)
        if path and not path.startswith("pkg://") and not os.path.isfile(path):
            yield missing_file(key, path)
