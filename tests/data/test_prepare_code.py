"""HumanEval and MBPP: rows, splits, layouts of local copies, and the example that trains on them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from pyarrow import parquet

from paddock.cli import main as paddock
from paddock.data.prepare import main
from paddock.facts.datasets import known_dataset
from paddock.rewards.rules import scorer_of

REAL = ROOT.parent / "shared" / "data" / "humaneval"
SCRIPT = ROOT / "examples" / "sandbox" / "run_qwen2.5-3b_sandbox.sh"
TASK = {
    "task_id": "HumanEval/0",
    "prompt": 'def more(x: int) -> int:\n    """ One more. """\n',
    "entry_point": "more",
    "canonical_solution": "    return x + 1\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}
SMALL = {
    "task_id": 601,
    "text": "Write a function to add one.",
    "code": "def more(x):\n  return x + 1",
    "test_list": ["assert more(1) == 2", "assert more(-1) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}


def prepare(name: str, source: Path, target: Path) -> int:
    return main(name, ["--local_dataset_path", str(source), "--local_save_dir", str(target)])


def write(folder: Path, file: str, records: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    path = folder / file
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return folder


def rows(folder: Path, split: str) -> list[dict]:
    return parquet.read_table(folder / f"{split}.parquet").to_pylist()


def test_a_humaneval_record_becomes_the_documented_row(tmp_path, capsys):
    raw = write(tmp_path / "raw", "HumanEval.jsonl.gz", [TASK])
    assert prepare("humaneval", raw, tmp_path / "out") == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["test.parquet"]
    assert "Wrote 1 test rows" in capsys.readouterr().out
    (row,) = rows(tmp_path / "out", "test")
    truth = json.loads(row["reward_model"].pop("ground_truth"))
    assert truth == {name: TASK[name] for name in ("prompt", "test", "entry_point")}
    assert row == {
        "data_source": "openai/openai_humaneval",
        "prompt": [
            {
                "role": "user",
                "content": "Complete this Python function. Answer with the whole function in one ```python block.\n\n"
                '```python\ndef more(x: int) -> int:\n    """ One more. """\n```',
            }
        ],
        "ability": "code",
        "reward_model": {"style": "rule"},
        "extra_info": {"split": "test", "index": 0, "task_id": "HumanEval/0"},
    }


def test_an_mbpp_record_becomes_the_documented_row(tmp_path):
    raw = write(tmp_path / "raw", "mbpp.jsonl", [SMALL, SMALL | {"task_id": 11}])
    assert prepare("mbpp", raw, tmp_path / "out") == 0
    (row,) = rows(tmp_path / "out", "train")
    truth = json.loads(row["reward_model"].pop("ground_truth"))
    assert truth == {"test_list": SMALL["test_list"], "test_setup_code": ""}
    assert row == {
        "data_source": "google-research-datasets/mbpp",
        "prompt": [
            {
                "role": "user",
                "content": "Write a function to add one.\n\nAnswer with the Python code in one ```python block. "
                "It must pass these tests:\n\n```python\nassert more(1) == 2\nassert more(-1) == 0\n```",
            }
        ],
        "ability": "code",
        "reward_model": {"style": "rule"},
        "extra_info": {"split": "train", "index": 0, "task_id": 601},
    }
    assert rows(tmp_path / "out", "test")[0]["extra_info"] == {"split": "test", "index": 0, "task_id": 11}


def test_the_authors_file_is_split_by_the_authors_numbers(tmp_path):
    raw = write(tmp_path / "raw", "mbpp.jsonl", [SMALL | {"task_id": number} for number in range(1, 975)])
    assert prepare("mbpp", raw, tmp_path / "out") == 0
    found = {split: rows(tmp_path / "out", split) for split in ("train", "test")}
    numbers = {split: [row["extra_info"]["task_id"] for row in own] for split, own in found.items()}
    assert numbers == {"train": list(range(601, 975)), "test": list(range(11, 511))}
    known = known_dataset("mbpp/train.parquet")
    assert known and {split: len(own) for split, own in found.items()} == {
        split: known.splits[split] for split in found
    }


def test_files_by_split_are_read_too(tmp_path):
    raw = write(tmp_path / "raw", "train.jsonl", [SMALL])
    write(raw, "test.jsonl", [SMALL | {"task_id": 11}])
    assert prepare("mbpp", raw, tmp_path / "out") == 0
    assert len(rows(tmp_path / "out", "train")) == len(rows(tmp_path / "out", "test")) == 1


@pytest.mark.parametrize(
    ("name", "file", "record", "column"),
    [
        ("humaneval", "HumanEval.jsonl", {**TASK, "test": None}, "test"),
        ("humaneval", "HumanEval.jsonl", {**TASK, "entry_point": ""}, "entry_point"),
        ("mbpp", "mbpp.jsonl", {**SMALL, "test_list": []}, "test_list"),
        ("mbpp", "mbpp.jsonl", {**SMALL, "test_list": "assert"}, "test_list"),
        ("mbpp", "mbpp.jsonl", {**SMALL, "task_id": "601"}, "task_id"),
        ("mbpp", "mbpp.jsonl", {**SMALL, "text": ""}, "text"),
    ],
)
def test_a_record_that_cannot_be_judged_is_named_by_file_line_and_column(tmp_path, capsys, name, file, record, column):
    raw = write(tmp_path / "raw", file, [record, SMALL | {"task_id": 11}] if name == "mbpp" else [record])
    assert prepare(name, raw, tmp_path / "out") == 2
    assert f"{raw / file} row 0, column {column!r}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_real_humaneval_has_164_rows_that_a_scorer_takes(tmp_path):
    if not REAL.is_dir():
        pytest.skip("HumanEval is not beside this checkout")
    assert prepare("humaneval", REAL, tmp_path) == 0
    found = rows(tmp_path, "test")
    assert len(found) == 164 and {row["data_source"] for row in found} == {"openai/openai_humaneval"}
    assert scorer_of(found[0]["data_source"]).target.name == "humaneval"
    assert [row["extra_info"]["task_id"] for row in found] == [f"HumanEval/{number}" for number in range(164)]


@pytest.mark.parametrize(
    ("name", "file", "record"), [("humaneval", "HumanEval.jsonl", TASK), ("mbpp", "mbpp.jsonl", SMALL)]
)
def test_the_scripts_do_what_the_command_does(tmp_path, name, file, record):
    records = [record, record | {"task_id": 11}] if name == "mbpp" else [record]
    raw = write(tmp_path / "raw", file, records)
    flags = ["--local_dataset_path", str(raw), "--local_save_dir", str(tmp_path / "script")]
    script = ROOT / "examples" / "data_preprocess" / f"{name}.py"
    subprocess.run([sys.executable, str(script), *flags], cwd=script.parent, check=True, capture_output=True)
    assert prepare(name, raw, tmp_path / "command") == 0
    assert (tmp_path / "script/test.parquet").read_bytes() == (tmp_path / "command/test.parquet").read_bytes()


def test_the_example_is_planned_with_its_sandbox(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paddock(["run", "--plan", str(SCRIPT), "reward_model.sandbox.isolation=unshare"]) == 0
    shown = capfd.readouterr().out
    assert "128 prompts x 8 responses = 1024 rows" in shown
    assert "374 rows" in shown
    assert "reward_model.sandbox.isolation=unshare" in shown
