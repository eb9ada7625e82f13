"""Files as people have them: every format gives the same prompts, plain columns are found, folders stand for files."""

from __future__ import annotations

import csv
import gzip
import json
import logging
from datetime import date
from decimal import Decimal

import datasets
import pyarrow as pa
import pytest
from byte_tokenizer import byte_tokenizer
from pyarrow import parquet

from paddock.config.schema import DataConfig
from paddock.data import hub
from paddock.data.dataset import PromptDataset
from paddock.data.unscored import AnswerDataset, UnscoredDataset
from paddock.errors import UserError
from paddock.facts.files import columns_of, count_rows, hub_name, sources

PLAIN = [{"question": f"{n} + {n}?", "answer": str(2 * n), "level": "easy, or\nnot"} for n in range(7)]


def save(folder, name, rows=PLAIN):
    """Writes rows in the format that the name asks for; returns what to name in data.train_files."""
    path = folder / name
    text = {".json": json.dumps(rows), ".jsonl": f"\n{' ' * 99}\r\n".join(map(json.dumps, rows)), ".ndjson": None}
    suffix = "." + name.removesuffix(".gz").rpartition(".")[2]
    if name == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif name == "splits":
        datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:2])
                             ).save_to_disk(path)  # fmt: skip
    elif name == "folder":
        (path / "more").mkdir(parents=True)
        save(path, "a.csv", rows[:3])
        save(path, "b.jsonl", rows[3:])
        save(path / "more", "c.jsonl", rows)  # folders in it are something else
        (path / "readme.md").write_text("two files")
    elif suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif suffix in (".csv", ".tsv"):
        with gzip.open(path, "wt", newline="") if name.endswith(".gz") else path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(text[suffix].encode()))
    else:
        path.write_text(text[suffix] or "\n".join(map(json.dumps, rows)))
    return str(path)


def opened(path, kind=PromptDataset, key="data.train_files", tokenizer=None, **settings):
    return kind(path, tokenizer or byte_tokenizer(), DataConfig(seed=0, **settings), key=key)


NAMES = ["a.parquet", "a.jsonl", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.json.gz", "a.csv.gz",
         "saved", "splits", "folder"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_prompts_and_answers(tmp_path, name, caplog):
    path = save(tmp_path, name)
    assert count_rows(path) == 7 and columns_of(*sources(path)) == ["question", "answer", "level"]
    with caplog.at_level(logging.INFO, "paddock"):
        data = opened(path)
    rows = data.rows(range(7))
    assert ["".join(turn["content"] for turn in row.messages) for row in rows] == [row["question"] for row in PLAIN]
    assert [row.ground_truth for row in rows] == [row["answer"] for row in PLAIN]
    assert rows[4].extra_info == {"answer": "8", "level": "easy, or\nnot"}
    assert {row.data_source for row in rows} <= {"a", "b", "data-00000-of-00001"}
    assert "prompts from 'question' (data.prompt_key), answers from 'answer' (data.answer_key)" in caplog.text


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if "." in name])
def test_a_large_file_is_read_from_disk_and_is_the_same(tmp_path, name, large, monkeypatch):
    path = save(tmp_path, name)
    small = opened(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if large:
        monkeypatch.setattr("paddock.data.tables.SMALL", 0)
        monkeypatch.setattr("paddock.data.dataset.MANY", 1)
    for _ in range(2):  # made, then found in the cache
        data = opened(path)
        assert data.identity == small.identity
        assert data.rows([6, 0, 3]) == small.rows([6, 0, 3])
    assert any((tmp_path / "cache").rglob("rows/*")) is large


def test_processes_find_the_same_lengths_and_report_a_broken_row(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = save(tmp_path, "a.jsonl", [{"prompt": "x" * (n % 9 + 1), "answer": n} for n in range(40)])
    alone = opened(file, max_prompt_length=5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr("paddock.data.processes.MANY", 10)
    monkeypatch.setattr("paddock.data.processes.CHUNK", 1)
    assert opened(file, max_prompt_length=5).kept.tolist() == alone.kept.tolist()
    assert 0 < len(alone) < 40
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "answer": 1}\n' * 20 + "{oops\n")
    with pytest.raises(UserError, match=r"a\.jsonl row 20: not JSON"):
        opened(file)


@pytest.mark.parametrize(
    ("row", "prompt", "truth"),
    [
        ({"prompt": "p", "answer": 4}, "p", "4"),
        ({"problem": "p", "solution": [1, "é"]}, "p", ["1", "é"]),
        ({"problem": "p", "solution": {"a": "é"}}, "p", '{"a": "é"}'),
        ({"problem": "p", "solution": [{"a": 1}]}, "p", '[{"a": 1}]'),
        ({"instruction": "do", "input": "this", "label": True}, "do\n\nthis", "true"),
        ({"instruction": "do", "input": "", "ground_truth": "g", "prompt_id": 1}, "do", "g"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}, "hi", "yo"),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "answer": 2},
            "hi",
            "2",
        ),
        ({"prompt": "p", "other": "x"}, "p", None),
        ({"question": "q", "data_source": "mine/too", "answer": "a"}, "q", "a"),
    ],
)
def test_columns_are_found_by_their_names(tmp_path, row, prompt, truth):
    found = opened(save(tmp_path, "a.jsonl", [row]))[0]
    assert "".join(turn["content"] for turn in found.messages) == prompt
    assert found.ground_truth == truth
    assert found.data_source == row.get("data_source", "a")


def test_true_answers_that_json_does_not_have_are_written_without_quotes(tmp_path):
    for value in (Decimal("18.50"), date(2020, 1, 2), [Decimal("1.50"), Decimal("2.00")]):
        parquet.write_table(pa.Table.from_pylist([{"question": "q", "answer": value}]), tmp_path / "a.parquet")
        expected = [str(item) for item in value] if isinstance(value, list) else str(value)
        assert opened(str(tmp_path / "a.parquet"))[0].ground_truth == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"splits": 3}', "{}"])
def test_a_damaged_list_of_splits_is_named(tmp_path, content):
    folder = save(tmp_path, "splits")
    (tmp_path / "splits" / "dataset_dict.json").write_text(content)
    with pytest.raises(UserError, match=r"dataset_dict\.json cannot be read"):
        opened(folder)


def test_a_question_is_a_users_message_if_there_is_a_chat_template_and_plain_text_without(tmp_path):
    path, plain = save(tmp_path, "a.csv"), byte_tokenizer()
    plain.chat_template = None
    assert opened(path, tokenizer=plain)[0].messages == "0 + 0?"
    assert opened(path)[0].messages == [{"role": "user", "content": "0 + 0?"}]


def test_columns_may_be_named(tmp_path):
    path = save(tmp_path, "a.csv", [{"q": "1?", "gold": "1", "answer": "no"}])
    row = opened(path, prompt_key="q", answer_key="gold")[0]
    assert (row.messages[0]["content"], row.ground_truth) == ("1?", "1")
    with pytest.raises(UserError, match=r"data\.answer_key=glod: .* it has 'q', 'gold', 'answer'"):
        opened(path, prompt_key="q", answer_key="glod")
    with pytest.raises(UserError, match=r"has no column 'prompt'; it has 'q', 'gold', 'answer'\n  fix: .*prompt_key"):
        opened(path)


def test_answers_to_learn_and_prompts_to_answer_are_found_too(tmp_path):
    path = save(tmp_path, "a.csv")
    assert opened(path, AnswerDataset).rows([1])[0].ground_truth == [
        *byte_tokenizer()("2")["input_ids"],
        byte_tokenizer().eos_token_id,
    ]
    assert opened(path, UnscoredDataset).rows([1])[0].messages == "1 + 1?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,answer\n1?,2\n3?,4,5\n", r"row 1: has 3 values, and the header names 2 columns"),
        ("question,answer\n1?,2\n3?,\n", r"row 1, column 'answer': there is no answer"),
        ("question,answer\n", "holds no rows"),
        ("answer,answer\n1,2\n", "names the column 'answer' twice"),
        ('question,answer\n"1?,2\n', "cannot be read"),
    ],
)
def test_a_mistake_in_a_csv_file_is_named_with_its_place(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        opened(str(tmp_path / "a.csv"))


def test_a_csv_file_as_a_spreadsheet_writes_it(tmp_path):
    """A byte order mark, semicolons, and line breaks of Windows."""
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfquestion;answer\r\n"a; ""b""";1,5\r\n\r\nc;2\r\n')
    rows = opened(str(tmp_path / "a.csv")).rows([0, 1])
    assert [(row.messages[0]["content"], row.ground_truth) for row in rows] == [('a; "b"', "1,5"), ("c", "2")]


def test_the_key_chooses_the_split_of_a_folder(tmp_path):
    saved = save(tmp_path, "splits")
    assert len(opened(saved)) == 7 and len(opened(saved, key="data.val_files")) == 2
    folder = tmp_path / "files"
    folder.mkdir()
    save(folder, "train-00000-of-00002.parquet", PLAIN[:4])
    save(folder, "train-00001-of-00002.parquet", PLAIN[4:])
    save(folder, "validation.jsonl", PLAIN[:1])
    (tmp_path / "clone" / "data").mkdir(parents=True)
    save(tmp_path / "clone" / "data", "train.csv")
    assert len(opened(str(tmp_path / "clone"))) == 7
    assert len(opened(str(folder))) == 7 and len(opened(str(folder), key="data.val_files")) == 1


def test_a_large_file_that_changes_under_a_run_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("paddock.data.tables.SMALL", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = save(tmp_path, "a.jsonl")
    data = opened(path)
    first = data.rows([0])
    (tmp_path / "a.jsonl").touch()
    assert data.rows([0]) == first
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"question": "new", "answer": "row"}\n')
    with pytest.raises(UserError, match="changed while it was used"):
        data.rows([0])


def test_a_name_of_the_hub_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert hub_name("openai/gsm8k") and hub_name("openai/gsm8k:main")
    assert not any(map(hub_name, ["data/train", "rows.csv", "a/b.csv", "/a/b", "./a/b", "~/a", "a/b/c", "gsm8k"]))


def test_a_data_set_of_the_hub_is_loaded_by_datasets_and_read_from_its_files(tmp_path, monkeypatch):
    """`load_dataset` loads a folder laid out as a repository of the hub: only the download is missing."""
    repository = tmp_path / "repository"
    repository.mkdir()
    save(repository, "train.jsonl")
    save(repository, "test.jsonl", PLAIN[:2])
    load = datasets.load_dataset
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config: load(str(repository), config, cache_dir=str(tmp_path / "hub"))
    )
    assert len(opened("org/sums")) == 7 and opened("org/sums")[6].ground_truth == "12"
    assert len(opened("org/sums", key="data.val_files")) == 2


def test_an_unreachable_hub_is_an_error_with_a_way_out(monkeypatch):
    monkeypatch.setattr(hub, "load_from_hub", lambda *_: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(UserError, match=r"data\.train_files=org/name: is no file .* no route\n  fix: correct the path"):
        opened("org/name")


@pytest.mark.parametrize("form", ["plain", "verl", "answers"])
@pytest.mark.parametrize(("different", "said"), [(1, "49 of the first 50"), (20, "30 of the first 50"), (25, None)])
def test_rows_to_train_on_that_are_mostly_equal_are_told_in_one_line(tmp_path, caplog, form, different, said):
    rows = [{"prompt": f"{n % different}+1=", "answer": str(n % different + 1)} for n in range(50)]
    if form == "verl":
        truths = [{"style": "rule", "ground_truth": row["answer"]} for row in rows]
        rows = [
            {"prompt": row["prompt"], "data_source": "mine", "reward_model": truth, "extra_info": {"index": n}}
            for n, (row, truth) in enumerate(zip(rows, truths, strict=True))
        ]
    config = DataConfig(train_files=str(save(tmp_path, "t.jsonl", rows)), val_files=str(tmp_path / "t.jsonl"))
    kind = AnswerDataset if form == "answers" else PromptDataset
    kind.train(config, byte_tokenizer())
    kind.validation(config, byte_tokenizer())
    told = [r.getMessage() for r in caplog.records if "equal to an earlier one" in r.getMessage()]
    assert told == ([f"data.train_files: {said} rows are equal to an earlier one"] if said else [])
