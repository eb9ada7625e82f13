"""`paddock data geo3k`: drawings travel as the bytes they were published as."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from paddock.data.prepare import main

ROOT = Path(__file__).parents[2]
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def prepare(tmp_path: Path, *records: dict) -> int:
    (tmp_path / "raw").mkdir(exist_ok=True)
    for split in ("train", "test"):
        (tmp_path / "raw" / f"{split}.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    flags = ["--local_dataset_path", str(tmp_path / "raw"), "--local_save_dir", str(tmp_path / "out")]
    return main("geo3k", flags)


def picture(tmp_path: Path) -> str:
    (tmp_path / "angle.png").write_bytes(PICTURE)
    return str(tmp_path / "angle.png")


def rows(tmp_path: Path) -> list[dict]:
    return parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()


def test_a_record_becomes_the_documented_row(tmp_path):
    record = {"problem": "<image>Find x.", "answer": "3", "images": [picture(tmp_path)]}
    assert prepare(tmp_path, record) == 0
    instruction = r"Reason first, between <think> and </think>. Then give the final answer in \boxed{}."
    assert rows(tmp_path) == [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": f"<image>Find x. {instruction}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
            "images": [{"bytes": PICTURE, "path": "angle.png"}],
        }
    ]


def test_the_example_script_is_the_same_command(tmp_path):
    prepare(tmp_path, {"problem": "<image>Find x.", "answer": "3", "images": [picture(tmp_path)]})
    script = ROOT / "examples" / "data_preprocess" / "geo3k.py"
    flags = ["--local_dataset_path", tmp_path / "raw", "--local_save_dir", tmp_path / "script"]
    done = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    one, other = ((tmp_path / folder / "train.parquet").read_bytes() for folder in ("out", "script"))
    assert one == other


def test_a_problem_without_a_place_for_its_drawing_gets_one(tmp_path):
    prepare(tmp_path, {"problem": "Find x.", "answer": "3", "images": [picture(tmp_path)]})
    assert rows(tmp_path)[0]["prompt"][0]["content"].startswith("<image>Find x. ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": []}, "holds no drawing"),
        ({"images": ["nowhere.png"]}, "nowhere.png: No such file"),
        ({"images": [7]}, "is 7, not a picture"),
        ({"problem": "<image> and <image>"}, "has 1 drawings, and the problem 2 places"),
        ({"answer": None}, "column 'answer': is missing"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(tmp_path, capsys, change, message):
    record = {"problem": "<image>Find x.", "answer": "3", "images": [picture(tmp_path)]}
    assert prepare(tmp_path, record, record | change) == 2
    error = capsys.readouterr().err
    assert "train.jsonl row 1" in error and message in error


def test_what_datasets_stores_as_pictures_is_not_drawn_again(tmp_path):
    """As the hub has it: bytes in the table, which `datasets` would decode."""
    build = f"""
import datasets, sys
import pyarrow as pa
from paddock.data.prepare import main
features = datasets.Features({{"problem": datasets.Value("string"), "answer": datasets.Value("string"),
                              "images": [datasets.Image()]}})
rows = [{{"problem": "<image>Find x.", "answer": "3", "images": [{{"bytes": {PICTURE!r}, "path": None}}]}}]
stored = pa.Table.from_pylist(rows, schema=features.arrow_schema)
table = datasets.Dataset(datasets.table.InMemoryTable(stored), info=datasets.DatasetInfo(features=features))
datasets.DatasetDict(train=table, test=table).save_to_disk("saved")
sys.exit(main("geometry3k", ["--local_dataset_path", "saved", "--local_save_dir", "out"]))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path)[0]["images"] == [{"bytes": PICTURE, "path": None}]
