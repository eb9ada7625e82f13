"""Several files with weights: exact shares, each file row by row, the same again after a resume."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer

from paddock.config.schema import DataConfig
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.data.mixture import Mixture, shares
from paddock.errors import UserError
from paddock.loading.load import load


def files(folder, *sizes):
    for number, size in enumerate(sizes):
        lines = [json.dumps({"prompt": f"{number}-{row}", "answer": "x"}) for row in range(size)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return [str(folder / f"{number}.jsonl") for number in range(len(sizes))]


def loader(paths, batch, **settings):
    config = DataConfig(train_files=paths, train_batch_size=batch, seed=settings.pop("seed", 3), **settings)
    return Loader.train(config, PromptDataset.train(config, byte_tokenizer()))


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [(8, [3, 1], [6, 2]), (10, [1, 1, 1], [4, 3, 3]), (10, [0.5, 0.25, 0.25], [5, 3, 2]), (3, [100, 1], [3, 0])],
)
def test_shares_add_up(total, weights, expected):
    assert shares(total, weights) == expected


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_batch_has_its_share_and_every_row_of_a_file_comes_equally_often(tmp_path, shuffle):
    prompts = loader(files(tmp_path, 12, 20), 8, train_weights=[3, 1], shuffle=shuffle)
    seen = Counter()
    for _ in range(3 * prompts.steps_per_epoch):
        rows = prompts.next_prompts()
        assert Counter(row.data_source for row in rows) == {"0": 6, "1": 2}
        seen.update(row.index for row in rows)
    assert prompts.steps_per_epoch == 4  # 32 rows, as without weights
    counts = np.array([seen[index] for index in range(32)])
    assert counts[:12].sum() == 72 and set(counts[:12]) == {6}
    assert counts[12:].sum() == 24 and set(counts[12:]) == {1, 2}


def test_draws_of_one_row_have_ids_of_their_own(tmp_path):
    prompts = loader(files(tmp_path, 2, 30), 8, train_weights=[1, 1])
    groups = [row.group for _ in range(8) for row in prompts.next_prompts()]
    assert len(set(groups)) == len(groups) == 64


def test_a_resumed_order_goes_on_as_if_it_had_not_stopped(tmp_path):
    paths = files(tmp_path, 7, 11)
    whole = loader(paths, 4, train_weights=[2, 1])
    expected = [[row.group for row in whole.next_prompts()] for _ in range(11)]
    first = loader(paths, 4, train_weights=[2, 1])
    for _ in range(6):
        first.next_prompts()
    second = loader(paths, 4, train_weights=[2, 1])
    second.load_state_dict(first.state_dict())
    assert [[row.group for row in second.next_prompts()] for _ in range(5)] == expected[6:]
    other = loader(paths, 4, train_weights=[1, 1])
    with pytest.raises(UserError, match=r"data\.train_weights=\[1\.0, 1\.0\]: .*other weights"):
        other.load_state_dict(first.state_dict())


def test_another_seed_is_another_order_and_an_epoch_is_a_function_of_its_number():
    assert (Mixture([9, 9], [1, 2], 0, True)(5)[0] == Mixture([9, 9], [1, 2], 0, True)(5)[0]).all()
    assert (Mixture([9, 9], [1, 2], 0, True)(5)[0] != Mixture([9, 9], [1, 2], 1, True)(5)[0]).any()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "data.train_weights=[1]",
            r"there are 2 in data\.train_files and 1 weights\n  fix: data\.train_weights=\[1,1\]",
        ),
        ("data.train_weights=[1,0]", "must be > 0"),
        ("data.train_weights=[1,nan]", "is not a number"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, setting, message):
    a, b = files(tmp_path, 3, 3)
    with pytest.raises(UserError, match=message):
        load([f"data.train_files=[{a},{b}]", setting])
