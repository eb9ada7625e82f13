"""Row counts and columns of data files, and the answers to files that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from paddock.errors import UserError
from paddock.facts.files import columns_of, count_rows, sources

ROWS = [{"data_source": "a", "prompt": [{"role": "user", "content": str(n)}]} for n in range(3)]


@pytest.fixture(params=[".parquet", ".json", ".jsonl"])
def file(request, tmp_path):
    path = tmp_path / f"rows{request.param}"
    if request.param == ".parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif request.param == ".json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


def test_every_format_gives_the_same_count_and_columns(file):
    assert count_rows(file) == count_rows(str(file)) == 3
    assert columns_of(*sources(file)) == ["data_source", "prompt"]


def test_the_home_folder_may_be_written_as_a_tilde(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert count_rows(f"~/{file.name}") == 3


def test_a_missing_file_names_the_key_and_the_command_that_makes_it(tmp_path):
    with pytest.raises(UserError) as error:
        count_rows(f"{tmp_path}/gsm8k/train.parquet", key="data.train_files")
    assert error.value.key == "data.train_files"
    assert error.value.fix == f"paddock data gsm8k --local_save_dir {tmp_path}/gsm8k"
    with pytest.raises(UserError, match="does not exist"):
        count_rows("~no_such_user/rows.parquet")
    with pytest.raises(UserError, match="correct the path"):
        columns_of(*sources(tmp_path / "mine.parquet"), key="data.val_files")


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.parquet.tmp", "rows.parquet.gz"])
def test_an_unknown_suffix_is_refused(tmp_path, name):
    (tmp_path / name).write_text("a,b")
    with pytest.raises(UserError, match=r"must end in \.parquet, \.jsonl, .*\.csv"):
        count_rows(tmp_path / name)


def test_a_folder_without_data_files_is_refused(tmp_path):
    (tmp_path / "readme.md").write_text("no rows")
    with pytest.raises(UserError, match="the folder holds no data files"):
        count_rows(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.parquet", b"not parquet"), ("a.json", b"[1"), ("a.json", b"{}"), ("a.json", b"[1]"), ("a.jsonl", b"\xff\xfe")],
)
def test_an_unreadable_file_is_a_user_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"data\.train_files=.*cannot be read"):
        count_rows(tmp_path / name, key="data.train_files")


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert count_rows(tmp_path / "a.jsonl") == 0
    assert columns_of(*sources(tmp_path / "a.jsonl")) == []


def test_the_planner_can_import_it_without_torch_or_pyarrow():
    code = (
        "import sys; import paddock.facts.files, paddock.facts.datasets, paddock.data.prepare; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pyarrow', 'datasets', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
