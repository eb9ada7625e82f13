"""Preference pairs as reward models learn from them."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from byte_tokenizer import byte_tokenizer
from pyarrow import parquet

from paddock.config.schema import DataConfig
from paddock.data.pairs import PairDataset
from paddock.errors import UserError

USER = [{"role": "user", "content": "2+2?"}]


def says(text):
    return {"role": "assistant", "content": text}


def dataset(folder, rows, **settings):
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = DataConfig(seed=0, dataloader_num_workers=0, **settings)
    return PairDataset(str(folder / "pairs.jsonl"), byte_tokenizer(), config, key="data.train_files")


def texts(row):
    decode = byte_tokenizer().decode
    return decode(row.tokens), decode(row.ground_truth.chosen), decode(row.ground_truth.rejected)


@pytest.mark.parametrize(
    ("row", "learnt"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, ("2+2=", "4<|end|>", "5<|end|>")),
        (
            {"prompt": USER, "chosen": "4", "rejected": "five"},
            ("<|user|>2+2?<|end|><|assistant|>", "4<|end|>", "five<|end|>"),
        ),
        (
            {"prompt": USER, "chosen": [says("4")], "rejected": [says("5")]},
            ("<|user|>2+2?<|end|><|assistant|>", "4<|end|>", "5<|end|>"),
        ),
        (
            {"chosen": [*USER, says("4")], "rejected": [*USER, says("5")]},
            ("<|user|>2+2?<|end|><|assistant|>", "4<|end|>", "5<|end|>"),
        ),
        (
            {"prompt": "2+2?", "chosen": [*USER, says("4")], "rejected": [*USER, says("5")]},
            ("<|user|>2+2?<|end|><|assistant|>", "4<|end|>", "5<|end|>"),
        ),
    ],
    ids=["texts", "messages and texts", "messages and answers", "conversations", "conversations and a prompt"],
)
def test_pairs_are_read_in_every_form_they_are_published_in(row, learnt, tmp_path):
    assert texts(dataset(tmp_path, [row])[0]) == learnt


def test_parquet_is_read_too(tmp_path):
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5", "source": "x"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = DataConfig(train_files=str(tmp_path / "train.parquet"), seed=0)
    assert texts(PairDataset.train(config, byte_tokenizer())[0]) == ("2+2=", "4<|end|>", "5<|end|>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"row 1, column 'rejected': is the same as 'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, r"row 1, column 'rejected': is empty"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, r"row 1, column 'chosen': is '', not the text"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, r"row 1, column 'prompt': is empty, not a prompt"),
        ({"prompt": "a", "chosen": USER, "rejected": "c"}, r"row 1, column 'chosen': does not end with a message"),
        (
            {"chosen": [*USER, says("4")], "rejected": [{"role": "user", "content": "3+3?"}, says("5")]},
            r"row 1, column 'rejected': answers another conversation",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named_when_the_file_is_opened(row, message, tmp_path):
    with pytest.raises(UserError, match=message):
        dataset(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}, row])


def test_a_file_without_answers_lists_the_columns_it_has(tmp_path):
    with pytest.raises(
        UserError, match=r"no column 'rejected'; it has 'prompt', 'chosen'(.|\n)*prompt, chosen and rej"
    ):
        dataset(tmp_path, [{"prompt": "a", "chosen": "b"}])
    with pytest.raises(UserError, match="holds no rows"):
        dataset(tmp_path, [])


def test_a_pair_whose_longer_answer_is_too_long_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c" * n} for n in (1, 4, 5)]
    for _ in range(2):  # measured, then from the cache
        found = dataset(tmp_path, rows, max_response_length=5)
        assert [row.index for row in found.rows(range(len(found)))] == [0, 1] and found.left_out == 1


def test_both_answers_are_cut_where_that_is_wanted(tmp_path):
    rows = [{"prompt": "a", "chosen": "b" * 9, "rejected": "c" * 9}]
    found = dataset(tmp_path, rows, max_response_length=4, filter_overlong_prompts=False, truncation="right")
    assert texts(found[0]) == ("a", "bbbb", "cccc")
