"""verl's container: what plug-ins do with it, and how Paddock's functions read it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
protocol = import_module("verl.protocol")
DataProto = protocol.DataProto


def proto(**meta):
    return DataProto.from_dict(
        tensors={"x": torch.tensor([[1, 2], [3, 4], [5, 6]])},
        non_tensors={"uid": ["a", "b", "c"], "turns": [[1], [2, 3], []]},
        meta_info=meta,
    )


def test_tensors_and_objects_are_kept_apart():
    whole = DataProto.from_single_dict({"x": torch.ones(2, 3), "uid": np.array(["a", "b"], dtype=object)}, {"step": 1})
    assert len(whole) == whole.batch.batch_size[0] == 2 and whole.meta_info == {"step": 1}
    assert list(whole.batch) == ["x"] and list(whole.non_tensor_batch) == ["uid"]
    with pytest.raises(ValueError, match="neither tensors nor arrays"):
        DataProto.from_single_dict({"x": [1, 2]})
    with pytest.raises(ValueError, match="differ in rows"):
        DataProto(batch={"x": torch.ones(2, 3), "y": torch.ones(3)})
    objects = DataProto.from_dict(non_tensors={"uid": ["a"]})
    assert objects.batch is None and len(objects) == 1 and len(DataProto()) == 0


def test_an_object_may_be_a_list_of_any_length():
    assert proto().non_tensor_batch["turns"].tolist() == [[1], [2, 3], []]


def test_a_number_gives_a_row_and_anything_else_a_batch():
    row = proto(step=7)[1]
    assert row.batch["x"].tolist() == [3, 4] and row.non_tensor_batch["uid"] == "b" and row.meta_info == {"step": 7}
    for index in (slice(1, None), [1, 2], np.array([1, 2]), torch.tensor([False, True, True]), [False, True, True]):
        some = proto()[index]
        assert some.batch["x"].tolist() == [[3, 4], [5, 6]] and some.non_tensor_batch["uid"].tolist() == ["b", "c"]
    assert len(proto()[[]]) == 0


def test_select_keeps_and_pop_takes_out():
    whole = proto(step=7, seed=1)
    kept = whole.select(batch_keys=["x"], non_tensor_batch_keys=["uid", "images"], meta_info_keys=["step"])
    assert set(kept.non_tensor_batch) == {"uid"} and kept.meta_info == {"step": 7}
    assert kept.batch["x"] is whole.batch["x"]
    assert whole.select(deepcopy=True).batch["x"] is not whole.batch["x"]
    with pytest.raises(KeyError):
        whole.select(batch_keys=["y"])
    taken = whole.pop(batch_keys=["x"], non_tensor_batch_keys=["uid"])
    assert list(taken.batch) == ["x"] and list(taken.non_tensor_batch) == ["uid"] and taken.meta_info == {}
    assert list(whole.non_tensor_batch) == ["turns"] and len(whole.batch) == 0 and len(whole) == 3


def test_union_refuses_what_differs_and_changes_nothing_then():
    whole = proto(step=7)
    more = DataProto.from_dict({"x": whole.batch["x"].clone(), "y": torch.zeros(3)}, {"uid": ["a", "b", "c"]})
    assert whole.union(more) is whole and set(whole.batch) == {"x", "y"} and whole.meta_info == {"step": 7}
    for other in (DataProto(batch={"x": torch.zeros(3, 2)}), DataProto(meta_info={"step": 8})):
        with pytest.raises(ValueError, match="differ"):
            proto(step=7).union(other)
    with pytest.raises(ValueError, match="differ in rows"):
        whole.union(DataProto(batch={"z": torch.zeros(2)}))
    assert set(whole.batch) == {"x", "y"}


def test_rows_are_repeated_reordered_cut_and_joined():
    uids = [
        whole.non_tensor_batch["uid"].tolist() for whole in (proto().repeat(2), proto().repeat(2, interleave=False))
    ]
    assert uids == [["a", "a", "b", "b", "c", "c"], ["a", "b", "c", "a", "b", "c"]]
    whole = proto()
    whole.reorder(torch.tensor([2, 0, 1]))
    assert whole.non_tensor_batch["uid"].tolist() == ["c", "a", "b"] and whole.batch["x"][0].tolist() == [5, 6]
    assert [len(part) for part in whole.split(2)] == [2, 1] and [len(part) for part in whole.chunk(3)] == [1, 1, 1]
    with pytest.raises(ValueError, match="equal parts"):
        whole.chunk(2)
    again = DataProto.concat(whole.chunk(3))
    assert torch.equal(again.batch["x"], whole.batch["x"]) and again.non_tensor_batch["turns"][0] == []
    with pytest.raises(ValueError, match="differ in columns"):
        DataProto.concat([proto(), proto().select(non_tensor_batch_keys=[])])


def test_paddock_reads_the_columns_under_its_own_names():
    data = DataProto.from_dict(
        {
            "prompts": torch.tensor([[0, 8], [7, 8]]),
            "responses": torch.tensor([[1, 2, 0], [3, 0, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
            "token_level_scores": torch.ones(2, 3),
            "ref_log_prob": torch.zeros(2, 3),
            "acc": torch.ones(2),
        },
        {"uid": ["q", "p"], "__num_turns__": [1, 2]},
    )
    batch = protocol.to_batch(data)
    assert batch.need("mask").tolist() == [[1, 1, 0], [1, 0, 0]] and batch.need("lengths").tolist() == [2, 1]
    assert batch.need("prompt_mask").tolist() == [[0, 1], [1, 1]] and batch.group.tolist() == [0, 1]
    assert batch.scores is data.batch["token_level_scores"] and batch.ref_log_probs is data.batch["ref_log_prob"]
    assert list(batch.extras["num_turns"]) == [1, 2]
    alone = protocol.to_batch(SimpleNamespace(batch={"response_mask": torch.ones(2, 3)}))
    assert alone.group.tolist() == [0, 1] and alone.prompts.shape == (2, 0)
