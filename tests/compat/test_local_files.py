"""Data programs written for verl copy their files by `verl.utils.hdfs_io`: here into local folders."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from paddock.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
files, later = import_module("verl.utils.hdfs_io"), import_module("verl.utils.fs")


def test_local_files_are_copied_and_hdfs_is_refused(tmp_path):
    made, copied = tmp_path / "made", tmp_path / "copied"
    files.makedirs(str(made))
    (made / "train.parquet").write_text("rows")
    assert files.copy(str(made), str(copied)) and later.exists(str(copied / "train.parquet"))
    assert files.copy(src=str(made / "train.parquet"), dst=str(tmp_path / "one")) and files.exists(
        str(tmp_path / "one")
    )
    for refused in (lambda: files.makedirs("hdfs://a/b"), lambda: files.copy(str(made), "hdfs://a/b")):
        with pytest.raises(UserError, match="HDFS is not written"):
            refused()
