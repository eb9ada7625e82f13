"""`paddock data NAME`: flags, sources, errors, and what is written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from pyarrow import parquet

from paddock.data.prepare import NAMES, main

TRAIN = [
    {"question": "Two pens cost 4 coins. What do 600 pens cost?", "answer": "4/2 = 2\n600*2 = 1200\n#### 1,200"},
    {"question": "It was 3 degrees and fell by 5. Now?", "answer": "3-5 = -2\n#### -2"},
]
TEST = [{"question": "Half of 7?", "answer": "7/2 = 3.5\n#### 3.5"}]
REAL = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def raw_folder(folder: Path, train: list = TRAIN, test: list = TEST) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def prepare(source: Path, target: Path, *more: str, name: str = "gsm8k") -> int:
    return main(name, ["--local_dataset_path", str(source), "--local_save_dir", str(target), *more])


def read(path: Path) -> list[dict]:
    return parquet.read_table(path).to_pylist()


def refusal(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one message of a refused command."""
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("paddock: ") and "\n  fix: " in err
    return err


def test_a_gsm8k_record_becomes_the_documented_row(tmp_path):
    assert prepare(raw_folder(tmp_path / "raw"), tmp_path / "out") == 0
    assert read(tmp_path / "out" / "train.parquet")[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "Two pens cost 4 coins. What do 600 pens cost? "
                'Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": TRAIN[0]["answer"],
            "question": TRAIN[0]["question"],
        },
    }


def test_each_split_has_its_own_file_and_index(tmp_path):
    prepare(raw_folder(tmp_path / "raw"), tmp_path / "out")
    train, test = read(tmp_path / "out" / "train.parquet"), read(tmp_path / "out" / "test.parquet")
    assert [row["reward_model"]["ground_truth"] for row in train + test] == ["1200", "-2", "3.5"]
    assert [(row["extra_info"]["split"], row["extra_info"]["index"]) for row in train + test] == [
        ("train", 0),
        ("train", 1),
        ("test", 0),
    ]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json"])
def test_compressed_lines_and_json_lists_give_the_same_rows(tmp_path, suffix):
    raw = tmp_path / "raw"
    raw.mkdir()
    for name, records in (("train", TRAIN), ("test", TEST)):
        text = json.dumps(records) if suffix == ".json" else "\n\n".join(map(json.dumps, records))
        data = text.encode()
        (raw / f"{name}{suffix}").write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    assert prepare(raw, tmp_path / "out") == 0
    prepare(raw_folder(tmp_path / "plain"), tmp_path / "expected")
    assert read(tmp_path / "out" / "train.parquet") == read(tmp_path / "expected" / "train.parquet")


def test_pandas_reads_the_file_back(tmp_path):
    pandas = pytest.importorskip("pandas")
    prepare(raw_folder(tmp_path / "raw"), tmp_path / "out")
    frame = pandas.read_parquet(tmp_path / "out" / "train.parquet")
    assert frame["prompt"][1][0]["role"] == "user"
    assert frame["reward_model"][1] == {"style": "rule", "ground_truth": "-2"}


def test_the_last_line_says_what_was_written_and_what_to_type_next(tmp_path, capsys):
    prepare(raw_folder(tmp_path / "raw"), tmp_path / "out")
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"Wrote 2 train and 1 test rows to {tmp_path / 'out'}" in last
    assert f"paddock plan algorithm.adv_estimator=rloo data.train_files={tmp_path / 'out' / 'train.parquet'}" in last


def test_without_a_folder_the_files_go_to_data_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main("gsm8k", ["--local_dataset_path", str(raw_folder(tmp_path / "raw"))]) == 0
    assert (tmp_path / "data" / "gsm8k" / "test.parquet").is_file()


def test_local_dir_still_works_and_says_in_one_line_that_it_is_deprecated(tmp_path, capsys):
    raw = raw_folder(tmp_path / "raw")
    assert main("gsm8k", ["--local_dataset_path", str(raw), "--local_dir", str(tmp_path / "old")]) == 0
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "--local_dir" in err and "--local_save_dir" in err
    assert (tmp_path / "old" / "train.parquet").is_file()


def test_two_names_for_one_folder_agree_and_for_two_folders_do_not(tmp_path, capsys):
    raw = raw_folder(tmp_path / "raw")
    assert prepare(raw, tmp_path / "a", "--local_dir", f"{tmp_path}/./a/") == 0
    capsys.readouterr()
    message = refusal(capsys, prepare(raw, tmp_path / "a", "--local_dir", str(tmp_path / "b")))
    assert f"--local_dir={tmp_path / 'b'}" in message and str(tmp_path / "a") in message


def test_hdfs_dir_is_refused_by_name(tmp_path, capsys):
    message = refusal(capsys, prepare(raw_folder(tmp_path / "raw"), tmp_path / "out", "--hdfs_dir", "hdfs://host/x"))
    assert "--hdfs_dir=hdfs://host/x" in message and "hdfs dfs -put" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["", "s3://bucket/gsm8k"])
def test_a_folder_that_is_no_local_path_is_refused(capsys, folder):
    assert "--local_save_dir=" in refusal(capsys, main("gsm8k", ["--local_save_dir", folder]))


@pytest.mark.parametrize("argv", [["--no_such_flag"], ["--local_save"], ["stray"]])
def test_unknown_flags_are_a_usage_error(argv, capsys):
    message = refusal(capsys, main("gsm8k", argv))
    assert argv[0] in message and "usage: paddock data gsm8k" in message


def test_an_unknown_data_set_gets_a_suggestion(capsys):
    assert "did you mean 'gsm8k'?" in refusal(capsys, main("gsm8", []))
    assert all(name in refusal(capsys, main("imagenet", [])) for name in NAMES)


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"question": "2+2?", "answer": "It is 4"}, "answer"),
        ({"question": "2+2?", "answer": "It is 4\n####  "}, "answer"),
        ({"question": "2+2?"}, "answer"),
        ({"question": "", "answer": "#### 4"}, "question"),
        ({"question": ["2+2?"], "answer": "#### 4"}, "question"),
        ({"problem": "2+2?", "answer": "#### 4"}, "question"),
    ],
)
def test_a_broken_record_is_named_by_file_row_and_column(tmp_path, capsys, record, column):
    raw = raw_folder(tmp_path / "raw", test=[*TEST, record])
    message = refusal(capsys, prepare(raw, tmp_path / "out"))
    assert f"{raw / 'test.jsonl'} row 1, column {column!r}" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", "7", '"text"', "\udcff"])
def test_a_line_that_is_no_record_is_named(tmp_path, capsys, text):
    raw = raw_folder(tmp_path / "raw")
    with (raw / "train.jsonl").open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    assert str(raw / "train.jsonl") in refusal(capsys, prepare(raw, tmp_path / "out"))


def test_a_cut_off_gzip_file_is_named(tmp_path, capsys):
    raw = raw_folder(tmp_path / "raw")
    (raw / "train.jsonl").unlink()
    (raw / "train.jsonl.gz").write_bytes(gzip.compress(json.dumps(TRAIN[0]).encode())[:-12])
    assert str(raw / "train.jsonl.gz") in refusal(capsys, prepare(raw, tmp_path / "out"))


def test_a_missing_source_a_file_and_a_missing_split_are_each_explained(tmp_path, capsys):
    raw = raw_folder(tmp_path / "raw")
    assert "no such folder" in refusal(capsys, prepare(tmp_path / "nowhere", tmp_path / "out"))
    assert "is a file" in refusal(capsys, prepare(raw / "train.jsonl", tmp_path / "out"))
    (raw / "test.jsonl").unlink()
    assert "no test file" in refusal(capsys, prepare(raw, tmp_path / "out"))
    assert "has no records" in refusal(capsys, prepare(raw_folder(raw, test=[]), tmp_path / "out"))


def test_a_failed_run_leaves_the_old_files_and_no_temporary_ones(tmp_path, capsys):
    target = tmp_path / "out"
    prepare(raw_folder(tmp_path / "raw"), target)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    assert prepare(raw_folder(tmp_path / "bad", train=[{"question": "?"}]), target) == 2
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before


def test_an_error_while_writing_leaves_the_old_file(tmp_path, monkeypatch, capsys):
    target = tmp_path / "out"
    prepare(raw_folder(tmp_path / "raw"), target)
    before = (target / "train.parquet").read_bytes()

    def full_disk(table, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full_disk)
    capsys.readouterr()
    assert "No space left on device" in refusal(capsys, prepare(tmp_path / "raw", target))
    assert (target / "train.parquet").read_bytes() == before
    assert sorted(file.name for file in target.iterdir()) == ["test.parquet", "train.parquet"]


def test_a_target_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    message = refusal(capsys, prepare(raw_folder(tmp_path / "raw"), tmp_path / "file" / "out"))
    assert "cannot be written" in message and "--local_save_dir" in message


def test_raw_json_lines_and_the_result_may_share_a_folder_also_twice(tmp_path):
    raw = raw_folder(tmp_path / "gsm8k")
    assert prepare(raw, raw) == 0
    assert prepare(raw, raw) == 0


def test_raw_parquet_files_are_not_overwritten_by_their_own_preparation(tmp_path, capsys):
    prepare(raw_folder(tmp_path / "raw"), tmp_path / "out")
    capsys.readouterr()
    assert "would be overwritten" in refusal(capsys, prepare(tmp_path / "out", tmp_path / "out"))


@pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason=f"no copy of GSM8K at {REAL}")
def test_the_real_gsm8k_gives_all_rows_with_their_known_answers(tmp_path):
    assert prepare(REAL, tmp_path) == 0
    train, test = read(tmp_path / "train.parquet"), read(tmp_path / "test.parquet")
    assert (len(train), len(test)) == (7473, 1319)
    truths = [[row["reward_model"]["ground_truth"] for row in rows] for rows in (train, test)]
    assert truths[0][:3] == ["72", "10", "5"]
    assert truths[1][:3] == ["18", "3", "70000"]
    assert all(float(truth) == float(truth) for truth in truths[0] + truths[1])
