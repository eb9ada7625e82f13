"""The order of prompts: shuffled by seed and epoch, resumable at any place, and the batches made of them."""

from __future__ import annotations

import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer

from paddock.config.schema import DataConfig
from paddock.core.rng import permutation
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader, prompt_batch, validation_batches
from paddock.errors import UserError

TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def dataset(tmp_path, texts=None, name="rows.jsonl", **settings) -> PromptDataset:
    texts = texts or [f"{n}+{n}=" for n in range(10)]
    rows = [
        {
            "data_source": "odd" if n % 2 else "even",
            "prompt": text,
            "reward_model": {"style": "rule", "ground_truth": n},
        }
        for n, text in enumerate(texts)
    ]
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset(str(tmp_path / name), TOKENIZER, DataConfig(**settings), key="data.train_files")


def indices(rows) -> list[int]:
    return [row.index for row in rows]


@pytest.mark.parametrize("look_ahead", [False, True])
def test_the_order_is_the_permutation_of_seed_and_epoch(tmp_path, look_ahead):
    loader = Loader(dataset(tmp_path), 4, seed=3, look_ahead=look_ahead)
    for epoch in range(3):
        order = permutation(10, 3, epoch).tolist()
        assert [indices(rows) for rows in loader] == [order[:4], order[4:8]]
    assert loader.epoch == 3


def test_without_shuffle_rows_come_in_file_order(tmp_path):
    loader = Loader(dataset(tmp_path), 5, seed=0, shuffle=False)
    assert [indices(rows) for rows in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert loader.steps_per_epoch == 2


def test_draws_of_any_size_go_on_into_the_next_epoch(tmp_path):
    loader = Loader(dataset(tmp_path), 4, seed=0, shuffle=False)
    assert indices(loader.next_prompts(7)) == [0, 1, 2, 3, 4, 5, 6]
    assert indices(loader.next_prompts(3)) == [7, 8, 9]
    assert indices(loader.next_prompts(6)) == [0, 1, 2, 3, 4, 5]
    assert indices(loader.next_prompts()) == [6, 7, 8, 9] and loader.epoch == 1


def test_a_prompt_drawn_again_has_a_new_group(tmp_path):
    """Dynamic sampling draws several times a step, maybe over the end of an epoch: ids must not meet."""
    rows = dataset(tmp_path)
    loader = Loader(rows, 5, seed=0)
    drawn = [row for _ in range(6) for row in loader.next_prompts()]
    assert len({row.group for row in drawn}) == 30
    assert all(row.group % rows.total == row.index for row in drawn)
    assert {row.group for row in drawn[:10]} == set(range(10))


@pytest.mark.parametrize("before", [0, 1, 2, 3, 7])
def test_a_resumed_loader_goes_on_as_if_never_stopped(tmp_path, before):
    rows = dataset(tmp_path)
    whole, first = Loader(rows, 3, seed=5), Loader(rows, 3, seed=5)
    expected = [whole.next_prompts() for _ in range(before + 5)][before:]
    for _ in range(before):
        first.next_prompts()
    state = json.loads(json.dumps(first.state_dict()))
    second = Loader(dataset(tmp_path), 3, seed=5)
    second.load_state_dict(state)
    assert [second.next_prompts() for _ in range(5)] == expected


def test_another_batch_size_resumes_at_the_same_prompt(tmp_path):
    first = Loader(dataset(tmp_path), 4, seed=5)
    first.next_prompts()
    second = Loader(dataset(tmp_path), 2, seed=5)
    second.load_state_dict(first.state_dict())
    assert indices(second.next_prompts()) == permutation(10, 5, 0).tolist()[4:6]


@pytest.mark.parametrize("change", ["data", "rows used", "seed", "shuffle"])
def test_resuming_on_other_data_or_order_is_refused(tmp_path, change):
    same = ["1+1="] * 9 + ["100+100="]
    state = Loader(dataset(tmp_path, same), 2, seed=5).state_dict()
    texts = ["other"] * 10 if change == "data" else same
    rows = dataset(tmp_path, texts, max_prompt_length=4 if change == "rows used" else 512)
    other = Loader(rows, 2, seed=6 if change == "seed" else 5, shuffle=change != "shuffle")
    with pytest.raises(UserError, match=r"trainer.resume_mode=disable") as error:
        other.load_state_dict(state)
    assert error.value.key == {"seed": "data.seed", "shuffle": "data.shuffle"}.get(change, "data.train_files")


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data.train_batch_size=11: data.train_files gives 10 prompts"):
        Loader(dataset(tmp_path), 11, seed=0)
    with pytest.raises(UserError, match=r"data.gen_batch_size=11"):
        Loader(dataset(tmp_path), 5, seed=0).next_prompts(11)


def test_a_bad_row_found_ahead_of_time_is_reported_when_it_is_due(tmp_path):
    rows = dataset(tmp_path, ["a", "b", "c", "too long", "e", "f"], filter_overlong_prompts=False, max_prompt_length=3)
    loader = Loader(rows, 2, seed=0, shuffle=False, look_ahead=True)
    assert indices(loader.next_prompts()) == [0, 1]
    with pytest.raises(UserError, match=r"rows.jsonl row 3 has a prompt of 8 tokens"):
        loader.next_prompts()


def test_the_config_decides_the_loader(tmp_path):
    config = DataConfig(train_batch_size=3, seed=9, shuffle=False, dataloader_num_workers=0)
    assert indices(Loader.train(config, dataset(tmp_path)).next_prompts()) == [0, 1, 2]


def test_validation_gives_every_row_once_with_ids_that_never_change(tmp_path):
    rows = dataset(tmp_path)
    assert [len(batch) for batch in validation_batches(rows, 4)] == [4, 4, 2]
    assert [len(batch) for batch in validation_batches(rows)] == [10]
    for shuffle in (False, True, True):
        found = [row for batch in validation_batches(rows, 3, shuffle=shuffle, seed=1) for row in batch]
        assert sorted(row.group for row in found) == list(range(10))
        assert all(row.group == row.index for row in found)
    assert rows.sources == {"even": 5, "odd": 5}


def test_a_prompt_batch_repeats_and_pads_on_the_left(tmp_path):
    rows = dataset(tmp_path, ["ab", "abcd", "abc"]).rows([1, 2])
    batch = prompt_batch(rows, samples=2, pad_token=TOKENIZER.pad_token_id)
    assert batch.group.tolist() == [1, 1, 2, 2] and batch.row.tolist() == [2, 3, 4, 5]
    assert batch.prompt_mask.tolist() == [[1, 1, 1, 1]] * 2 + [[0, 1, 1, 1]] * 2
    assert batch.prompts[2, 0] == TOKENIZER.pad_token_id
    assert [TOKENIZER.decode(p[m == 1]) for p, m in zip(batch.prompts, batch.prompt_mask, strict=True)] == [
        "abcd", "abcd", "abc", "abc",
    ]  # fmt: skip
    assert batch.extras["ground_truth"] == [1, 1, 2, 2]
    assert batch.extras["data_source"] == ["odd", "odd", "even", "even"]
    assert batch.prompts.dtype == torch.long


def test_rows_of_different_draws_have_different_ids(tmp_path):
    loader = Loader(dataset(tmp_path), 5, seed=0)
    batches = [prompt_batch(loader.next_prompts(), 3, 0) for _ in range(4)]
    assert len({row for batch in batches for row in batch.row.tolist()}) == 60
