"""`paddock data from-jsonl`: questions of one's own."""

from __future__ import annotations

import gzip
import json

import pytest
from byte_tokenizer import byte_tokenizer
from pyarrow import parquet

from paddock.cli import main as paddock
from paddock.config.schema import DataConfig
from paddock.data.dataset import PromptDataset


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def prepare(*arguments):
    return paddock(["data", "from-jsonl", *map(str, arguments)])


def rows(folder, split="train"):
    return parquet.read_table(folder / f"{split}.parquet").to_pylist()


def test_a_line_becomes_the_row_that_training_reads(tmp_path):
    file = write(tmp_path / "sums.jsonl", [{"q": "2+2?", "a": 4, "more": [1]}])
    flags = ("--prompt-key", "q", "--answer-key", "a", "--data-source", "openai/gsm8k", "--test-share", "0")
    assert prepare(file, *flags, "--system", "Be brief.", "--instruction", "End with ####.", "--ability", "math") == 0
    assert rows(tmp_path) == [
        {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "2+2? End with ####."},
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 0, "answer": "4", "question": "2+2? End with ####."},
        }
    ]
    assert not (tmp_path / "test.parquet").exists()
    config = DataConfig(train_files=str(tmp_path / "train.parquet"), seed=0)
    row = PromptDataset.train(config, byte_tokenizer())[0]
    assert (row.ground_truth, row.data_source) == ("4", "openai/gsm8k")


def test_conversations_answers_of_any_kind_and_other_files_are_taken(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    with gzip.open(tmp_path / "talk.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": turns, "answer": ["x", "é"]}) + "\n")
    assert prepare(tmp_path / "talk.jsonl.gz", "--test-share", 0, "--local_save_dir", tmp_path / "out") == 0
    (row,) = rows(tmp_path / "out")
    assert row["prompt"] == turns and row["data_source"] == "talk"
    assert row["reward_model"]["ground_truth"] == '["x", "é"]'


def test_held_out_questions_are_the_same_everywhere_and_never_trained_on(tmp_path):
    records = [{"prompt": f"{n % 150}+1?", "answer": n % 150 + 1} for n in range(200)]
    file = write(tmp_path / "sums.jsonl", records)
    assert prepare(file, "--test-share", "0.1", "--local_save_dir", tmp_path / "a") == 0
    write(tmp_path / "sums.jsonl", records[::-1])
    assert prepare(file, "--test-share", "0.1", "--local_save_dir", tmp_path / "b") == 0
    train, test = (
        {row["extra_info"]["question"] for row in rows(tmp_path / "a", split)} for split in ("train", "test")
    )
    assert len(rows(tmp_path / "a", "test")) == 20  # rows, of which some ask the same
    assert 10 <= len(test) < 20 and not train & test and len(train | test) == 150
    assert test == {row["extra_info"]["question"] for row in rows(tmp_path / "b", "test")}


@pytest.mark.parametrize("distinct", [1000, 100, 10, 3])
def test_repeated_questions_do_not_change_the_share_that_is_held_out(tmp_path, distinct):
    file = write(tmp_path / "a.jsonl", [{"prompt": f"{n % distinct}?", "answer": "x"} for n in range(1000)])
    assert prepare(file, "--test-share", "0.1") == 0
    held_out = len(rows(tmp_path, "test"))
    assert held_out == (100 if distinct > 3 else 333)  # a question of 333 rows is on one side
    assert len(rows(tmp_path)) == 1000 - held_out


def test_one_question_alone_is_not_held_out(tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", [{"prompt": "same?", "answer": "x"}] * 20)
    assert prepare(file, "--test-share", "0.1") == 2
    assert "nothing is left to train on" in capsys.readouterr().err


def test_a_file_for_validation(tmp_path, capsys):
    train = write(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}])
    test = write(tmp_path / "b.json", [])
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "2", "answer": "2"}]))
    assert prepare(train, "--test-file", test) == 0
    assert [row["extra_info"]["split"] for row in rows(tmp_path, "test")] == ["test"]
    assert f"Next: paddock train data.train_files={tmp_path}/train.parquet data.val_files=" in capsys.readouterr().out


def test_rows_for_a_reward_model_need_no_answer(tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", [{"prompt": "tell me"}])
    assert prepare(file, "--style", "model", "--test-share", 0) == 0
    assert rows(tmp_path)[0]["reward_model"] == {"style": "model", "ground_truth": None}
    assert "paddock train reward_model.enable=True" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "flags", "message"),
    [
        ({"q": "x", "answer": "1"}, (), "row 1, column 'prompt': is missing; the record has 'q', 'answer'"),
        ({"prompt": "x"}, (), "row 1, column 'answer': there is no answer; the record has 'prompt'"),
        ({"prompt": [], "answer": "1"}, (), "row 1, column 'prompt': is empty"),
        ({"prompt": [{"role": "user", "content": [1]}], "answer": "1"}, (), "texts alone are taken"),
        ({"prompt": "x", "answer": "1"}, ("--test-share", "1"), "--test-share=1.0: is no share"),
        ({"prompt": "x", "answer": "1"}, ("--test-file", "nowhere.jsonl"), "nowhere.jsonl: the file does not exist"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_written(tmp_path, capsys, record, flags, message):
    file = write(tmp_path / "a.jsonl", [{"prompt": "fine", "answer": "1"}, record])
    assert prepare(file, *flags, "--local_save_dir", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error and "fix:" in error
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_kind_is_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x")
    assert prepare(tmp_path / "a.txt") == 2
    assert "is no JSON file by its name" in capsys.readouterr().err
