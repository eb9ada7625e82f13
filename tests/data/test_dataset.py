"""Rows of data files as prompts: formats, chat templates, lengths, and the answers to rows that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from byte_tokenizer import byte_tokenizer
from pyarrow import parquet

from paddock.config.schema import DataConfig
from paddock.data import processes
from paddock.data.dataset import PromptDataset
from paddock.data.reading import PromptLengths, Scorers
from paddock.errors import UserError

TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def record(text: str, source: str = "mine", **changes) -> dict:
    row = {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": text.upper()},
        "extra_info": {"split": "train", "note": text},
    }
    return row | changes


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        columns = dict.fromkeys(column for row in rows for column in row)
        parquet.write_table(pa.table({column: [row.get(column) for row in rows] for column in columns}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return str(path)


def dataset(files, tokenizer=TOKENIZER, *, most=-1, shuffle=False, **settings) -> PromptDataset:
    return PromptDataset(files, tokenizer, DataConfig(**settings), key="data.train_files", most=most, shuffle=shuffle)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    rows = dataset(write(tmp_path / f"rows{suffix}", [record("a"), record("bc")]))
    assert len(rows) == 2
    row = rows[1]
    assert (row.index, row.group, row.data_source, row.ground_truth) == (1, 1, "mine", "BC")
    assert row.messages == [{"role": "user", "content": "bc"}]
    assert row.extra_info == {"split": "train", "note": "bc"}
    assert row.location == f"{tmp_path}/rows{suffix} row 1"
    assert TOKENIZER.decode(row.tokens) == "<|user|>bc<|end|><|assistant|>"


def test_files_of_all_formats_mix_and_each_row_remembers_its_file(tmp_path):
    files = [
        write(tmp_path / "a.parquet", [record("a"), record("b")]),
        write(tmp_path / "c.jsonl", [record("c", prompt="plain text", extra_info=None)]),
        write(tmp_path / "d.json", [record("d", "other", reward_model={"style": "rule", "ground_truth": 4})]),
    ]
    rows = dataset(files).rows(range(4))
    assert [row.index for row in rows] == [0, 1, 2, 3]
    assert [row.location.removeprefix(f"{tmp_path}/") for row in rows] == [
        "a.parquet row 0", "a.parquet row 1", "c.jsonl row 0", "d.json row 0",
    ]  # fmt: skip
    assert TOKENIZER.decode(rows[2].tokens) == "plain text" and rows[2].extra_info == {}
    assert rows[3].ground_truth == 4
    assert dataset(files).sources == {"mine": 3, "other": 1}


def test_messages_become_what_the_tokenizer_itself_makes_of_them(tmp_path):
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hällo <|end|> 漢字"}]
    rows = dataset(
        write(tmp_path / "a.json", [record("x", prompt=conversation)]), apply_chat_template_kwargs={"thinking": True}
    )
    expected = TOKENIZER.apply_chat_template(
        conversation, add_generation_prompt=True, thinking=True, tokenize=True, return_dict=False
    )
    assert rows[0].tokens == expected and TOKENIZER.decode(expected).endswith("<|assistant|><think>")


def test_columns_can_have_other_names(tmp_path):
    rows = [{"question": "why", "kind": "k", "reward_model": {"style": "rule", "ground_truth": "1"}}]
    row = dataset(write(tmp_path / "a.parquet", rows), prompt_key="question", reward_fn_key="kind")[0]
    assert (row.messages, row.data_source) == ("why", "k")


def test_keys_that_only_other_rows_messages_have_are_absent(tmp_path):
    """A column of structs has every key in every row; a template that asks for `name` must not be told null."""
    rows = [record("a"), record("b", prompt=[{"role": "user", "content": "b", "name": "Ann"}])]
    read = dataset(write(tmp_path / "a.parquet", rows)).rows([0, 1])
    assert [row.messages for row in read] == [row["prompt"] for row in rows]


def test_a_text_that_looks_like_a_date_stays_a_text(tmp_path):
    rows = [record("x", reward_model={"style": "rule", "ground_truth": "2020-01-01"})]
    assert dataset(write(tmp_path / "a.jsonl", rows))[0].ground_truth == "2020-01-01"


# What is too long


LONG = [record("x" * length) for length in (3, 50, 7, 60)]  # 3 special tokens are added to each


@pytest.mark.parametrize(("how", "kept"), [("left", slice(-4, None)), ("right", slice(0, 4))])
def test_truncation_cuts_one_side(tmp_path, how, kept):
    text = "abcdefghij"
    file = write(tmp_path / "a.jsonl", [record("x", prompt=text)])
    row = dataset(file, max_prompt_length=4, filter_overlong_prompts=False, truncation=how)[0]
    assert TOKENIZER.decode(row.tokens) == text[kept]


def test_truncation_in_the_middle_keeps_both_ends(tmp_path):
    file = write(tmp_path / "a.jsonl", [record("x", prompt="abcdefghij")])
    row = dataset(file, max_prompt_length=5, filter_overlong_prompts=False, truncation="middle")[0]
    assert TOKENIZER.decode(row.tokens) == "ab" + "hij"


def test_truncation_error_names_the_row_and_its_length(tmp_path):
    rows = dataset(write(tmp_path / "a.jsonl", LONG), max_prompt_length=20, filter_overlong_prompts=False)
    assert len(rows[0].tokens) == 6
    with pytest.raises(UserError, match=r"data.max_prompt_length=20: .*a.jsonl row 3 has a prompt of 63 tokens"):
        rows.rows([2, 3])


def test_too_long_prompts_are_left_out_counted_and_keep_the_others_indices(tmp_path, caplog):
    rows = dataset(write(tmp_path / "a.parquet", LONG), max_prompt_length=20)
    assert [row.index for row in rows.rows(range(len(rows)))] == [0, 2]
    assert rows.left_out == 2 and "2 of 4 prompts" in caplog.text
    assert [row.index for row in rows.one_of_each_source()] == [0]


def test_data_without_a_prompt_that_fits_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data.max_prompt_length=4: every prompt .* the shortest has 6 tokens"):
        dataset(write(tmp_path / "a.parquet", LONG), max_prompt_length=4)


@pytest.mark.parametrize("workers", [1, 4])
def test_the_number_of_workers_does_not_change_what_is_left_out(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(processes, "CHUNK", 7)
    file = write(tmp_path / "a.jsonl", [record("x" * (n % 40)) for n in range(100)])
    rows = dataset(file, max_prompt_length=20, filter_overlong_prompts_workers=workers)
    assert rows.kept.tolist() == [n for n in range(100) if n % 40 + 3 <= 20]


# The cache of lengths


@pytest.fixture
def measured(monkeypatch) -> list[int]:
    """How many prompts were measured, not read from the cache: one entry for each data set."""
    counts: list[int] = []
    original = PromptLengths.__call__

    def count(measure, rows):
        counts.append(len(rows))
        return original(measure, rows)

    monkeypatch.setattr(PromptLengths, "__call__", count)
    return counts


def test_lengths_are_measured_once_for_all_limits(tmp_path, measured):
    file = write(tmp_path / "a.parquet", LONG)
    kept = [dataset(file, max_prompt_length=longest).kept.tolist() for longest in (20, 20, 55)]
    assert kept == [[0, 2], [0, 2], [0, 1, 2]] and measured == [4]


@pytest.mark.parametrize(
    "change", ["content", "template", "template_kwargs", "tokenizer", "column", "sample", "rotten cache", "torn cache"]
)
def test_whatever_decides_a_length_makes_the_cache_measure_again(tmp_path, measured, cache, change):
    file = Path(write(tmp_path / "a.jsonl", [record(f"text {n}", question="?") for n in range(4)]))
    tokenizer, settings = byte_tokenizer(), {}
    dataset(str(file), tokenizer, max_prompt_length=100)
    before = file.stat()
    if change == "content":
        file.write_text(file.read_text().replace("text 1", "text 7"))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time, another text
    elif change == "template":
        tokenizer.chat_template += "{# more #}"
    elif change == "template_kwargs":
        settings = {"apply_chat_template_kwargs": {"thinking": True}}
    elif change == "tokenizer":
        tokenizer.add_tokens(["text"])
    elif change == "column":
        settings = {"prompt_key": "question"}
    elif change == "sample":
        settings = {"most": 3}
    else:
        (kept,) = cache.rglob("prompts/*.npz")
        content = bytearray(kept.read_bytes())
        content[content.index(b"PK\x01\x02") - 1] ^= 1  # of the arrays; behind them is the directory of the archive
        kept.write_bytes(content if change == "rotten cache" else content[:-4])
    dataset(str(file), tokenizer, max_prompt_length=100, **settings)
    assert measured == [4, 3 if change == "sample" else 4]


def test_a_moved_file_is_the_same_data(tmp_path, measured):
    first = write(tmp_path / "a.parquet", LONG)
    second = str(Path(first).rename(tmp_path / "b.parquet"))
    write(Path(first), LONG)
    assert dataset(first).identity == dataset(second).identity and measured == [4]


def test_a_template_that_reads_the_clock_is_not_cached(tmp_path, measured):
    tokenizer = byte_tokenizer("{{ strftime_now('%A') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    file = write(tmp_path / "a.jsonl", [record("a")])
    dataset(file, tokenizer)
    dataset(file, tokenizer)
    assert measured == [1, 1]


def test_a_cache_that_cannot_be_written_costs_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(dataset(write(tmp_path / "a.parquet", LONG), max_prompt_length=20)) == 2


# Samples


def test_at_most_so_many_rows_are_used(tmp_path):
    file = write(tmp_path / "a.jsonl", [record(str(n)) for n in range(50)])
    assert dataset(file, most=5).kept.tolist() == [0, 1, 2, 3, 4]
    assert len(dataset(file, most=60)) == 50
    some = dataset(file, most=5, shuffle=True, seed=1)
    assert len(some) == 5 and some.kept.tolist() == dataset(file, most=5, shuffle=True, seed=1).kept.tolist()
    assert some.kept.tolist() != dataset(file, most=5, shuffle=True, seed=2).kept.tolist()


def test_train_and_validation_read_their_own_keys(tmp_path):
    config = DataConfig(
        train_files=[write(tmp_path / "a.jsonl", [record(str(n)) for n in range(9)])],
        val_files=write(tmp_path / "b.jsonl", [record("x")] * 9), train_max_samples=4, val_max_samples=2, seed=0,
    )  # fmt: skip
    assert (len(PromptDataset.train(config, TOKENIZER)), len(PromptDataset.validation(config, TOKENIZER))) == (4, 2)


# Rows that cannot be used


MISTAKES = {
    "no prompt": ({"prompt": None}, r"column 'prompt': is empty"),
    "empty prompt": ({"prompt": []}, r"column 'prompt': is empty"),
    "number": ({"prompt": 5}, r"column 'prompt': is 5"),
    "no role": ({"prompt": [{"content": "x"}]}, r"column 'prompt': a message has no role"),
    "no content": ({"prompt": [{"role": "user"}]}, r"column 'prompt': a message has no content"),
    "no source": ({"data_source": None}, r"column 'data_source': is None"),
    "no truth": ({"reward_model": {"style": "rule"}}, r"column 'reward_model': has no ground_truth"),
    "no reward model": ({"reward_model": None}, r"column 'reward_model': is None"),
    "image": ({"images": ["x.png"]}, r"column 'images': holds images"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_bad_row_is_named_with_file_row_column_and_fix(tmp_path, suffix, mistake):
    change, message = MISTAKES[mistake]
    if mistake == "number" and suffix == ".parquet":
        pytest.skip("a parquet column has one type")
    file = write(tmp_path / f"rows{suffix}", [record("fine"), record("bad") | change])
    with pytest.raises(UserError, match=rf"rows{suffix} row 1, {message}") as error:
        dataset(file)
    assert error.value.fix


def test_a_parquet_column_of_the_wrong_type_is_named(tmp_path):
    file = write(tmp_path / "a.parquet", [record("x", prompt=5)])
    with pytest.raises(UserError, match="row 0, column 'prompt': is 5, not a prompt"):
        dataset(file)


def test_rows_of_large_files_are_checked_once_and_again_if_they_or_their_column_change(tmp_path, monkeypatch):
    monkeypatch.setattr("paddock.data.dataset.MANY", 1)
    asked: list[str] = []
    check = Scorers.__call__
    monkeypatch.setattr(Scorers, "__call__", lambda self, rows: asked.append(self.column) or check(self, rows))
    name = f"sums of {tmp_path}"  # nobody else's
    file = write(tmp_path / "rows.jsonl", [record("a", name), record("b", "others", topic=name)])
    for _ in range(2):
        assert dataset(file).scorers == [(name, "rule"), ("others", "rule")]
    assert asked == ["data_source"]
    write(tmp_path / "rows.jsonl", [record("a", "others", topic=name), record("b", name, topic=name)])
    assert dataset(file).scorers == [("others", "rule"), (name, "rule")]
    assert dataset(file, reward_fn_key="topic").scorers == [(name, "rule")]
    assert asked == ["data_source", "data_source", "topic"]
    write(tmp_path / "rows.jsonl", [record("a", name), record("b", name, reward_model={"style": "rule"})])
    for _ in range(2):
        with pytest.raises(UserError, match="has no ground_truth"):
            dataset(file)


def test_a_row_that_a_reward_model_scores_needs_no_truth(tmp_path):
    file = write(tmp_path / "a.parquet", [record("x", reward_model={"style": "model", "ground_truth": None})])
    assert dataset(file)[0].ground_truth is None


@pytest.mark.parametrize(
    ("column", "fix"),
    [("prompt", "data.prompt_key"), ("data_source", "data.reward_fn_key"), ("reward_model", "ground_truth")],
)
def test_a_missing_column_lists_the_ones_present(tmp_path, column, fix):
    row = record("x")
    del row[column]
    with pytest.raises(UserError, match=f"has no column '{column}'; it has '") as error:
        dataset(write(tmp_path / "a.parquet", [row]))
    assert all(f"'{name}'" in str(error.value) for name in row) and fix in error.value.fix


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record("x")) + '\n{"prompt": \n')
    with pytest.raises(UserError, match=r"a.jsonl row 1: not JSON"):
        dataset(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match=r"a.jsonl row 0: a row must be a JSON object"):
        dataset(str(tmp_path / "a.jsonl"))


def test_files_that_are_missing_empty_or_unnamed_are_refused(tmp_path):
    for name in ("none.parquet", "none.jsonl"):
        with pytest.raises(UserError, match=f"data.train_files=.*{name}: the file does not exist"):
            dataset(str(tmp_path / name))
    with pytest.raises(UserError, match="holds no rows"):
        dataset(write(tmp_path / "a.jsonl", []))
    with pytest.raises(UserError, match="no data file is named"):
        dataset(None)


def test_a_template_that_refuses_a_row_names_it(tmp_path):
    tokenizer = byte_tokenizer("{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}x")
    with pytest.raises(UserError, match=r"row 1, column 'prompt': the chat template refuses it: .*no b"):
        dataset(write(tmp_path / "a.jsonl", [record("a"), record("b")]), tokenizer)


def test_messages_without_a_template_say_what_to_do(tmp_path):
    file = write(tmp_path / "a.jsonl", [record("a")])
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        dataset(file, byte_tokenizer(None))
    given = {"chat_template": "{{ messages[0].content }}"}
    assert TOKENIZER.decode(dataset(file, byte_tokenizer(None), apply_chat_template_kwargs=given)[0].tokens) == "a"


def test_a_truncation_that_came_with_the_tokenizer_does_not_cut_prompts(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(max_length=4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert len(dataset(write(tmp_path / "a.jsonl", LONG), tokenizer)[1].tokens) == 53
