from __future__ import annotations

import io

import pytest
import torch

from paddock.core.batch import Batch


def make(rows: list[int], width: int = 3, prompt: int = 2, **columns) -> Batch:
    ids = torch.tensor(rows)
    tokens = ids[:, None] * 10 + torch.arange(width)
    return Batch(
        row=ids,
        group=ids // 2,
        prompts=ids[:, None] * 100 + torch.arange(prompt),
        prompt_mask=torch.ones(len(rows), prompt),
        responses=tokens,
        mask=torch.ones(len(rows), width),
        extras={"truth": [f"answer {r}" for r in rows]},
        **columns,
    )


def test_a_missing_column_names_itself():
    with pytest.raises(ValueError, match="no 'values': the phase that fills it has not run"):
        make([0, 1]).need("values")


def test_with_fills_a_column_and_leaves_the_first_batch_alone():
    batch = make([0, 1])
    filled = batch.with_(values=torch.zeros(2, 3))
    assert batch.values is None
    assert torch.equal(filled.need("values"), torch.zeros(2, 3))
    assert filled.responses is batch.responses


@pytest.mark.parametrize(
    "columns",
    [
        {"valeus": torch.zeros(2, 3)},
        {"values": torch.zeros(3, 3)},
        {"values": torch.zeros(2, 4)},
        {"extras": {"truth": ["only one"]}},
    ],
)
def test_with_refuses_unknown_columns_and_wrong_shapes(columns):
    with pytest.raises(ValueError):
        make([0, 1]).with_(**columns)


@pytest.mark.parametrize(
    "index",
    [torch.tensor([2, 0]), torch.tensor([True, False, True]).flip(0), slice(0, 3, 2), torch.tensor([1, 1, 1])],
)
def test_rows_pick_every_column_alike(index):
    batch = make([5, 6, 7])
    picked = batch.rows(index)
    ids = torch.tensor([5, 6, 7])[index]
    assert torch.equal(picked.row, ids)
    assert torch.equal(picked.need("responses")[:, 0], ids * 10)
    assert list(picked.extras["truth"]) == [f"answer {r}" for r in ids.tolist()]
    assert len(picked) == len(ids)


def test_concat_pads_prompts_on_the_left_and_responses_on_the_right():
    joined = Batch.concat([make([1], width=2, prompt=1), make([2, 3], width=4, prompt=3)])
    assert joined.row.tolist() == [1, 2, 3]
    assert joined.prompts[0].tolist() == [0, 0, 100]
    assert joined.need("prompt_mask")[0].tolist() == [0, 0, 1]
    assert joined.need("responses")[0].tolist() == [10, 11, 0, 0]
    assert joined.need("mask")[0].tolist() == [1, 1, 0, 0]
    assert joined.extras["truth"] == ["answer 1", "answer 2", "answer 3"]


def test_concat_refuses_batches_of_different_phases():
    with pytest.raises(ValueError, match="differ in columns"):
        Batch.concat([make([1]), make([2], values=torch.zeros(1, 3))])


def test_a_batch_survives_a_safe_save_and_load():
    batch = make([0, 1], values=torch.rand(2, 3))
    file = io.BytesIO()
    torch.save({**batch.columns(), "extras": batch.extras}, file)
    file.seek(0)
    restored = Batch(**torch.load(file, weights_only=True))
    assert restored.extras == batch.extras
    assert all(torch.equal(column, batch.need(name)) for name, column in restored.columns().items())
    assert restored.columns().keys() == batch.columns().keys()
