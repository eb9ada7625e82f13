"""verl's container of a batch, as plug-ins read and write it: tensors, objects and settings by name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paddock.core.batch import Batch
from verl.trainer.ppo._advantages import group_ids

Objects = NDArray[Any]

COLUMNS = {
    "responses": "responses",
    "rollout_log_probs": "rollout_log_probs",
    "old_log_probs": "old_log_probs",
    "ref_log_prob": "ref_log_probs",
    "values": "values",
    "token_level_scores": "scores",
    "token_level_rewards": "rewards",
    "rollout_is_weights": "weights",
    "advantages": "advantages",
    "returns": "returns",
    "sum_pi_squared": "sum_pi_squared",
    "reward_baselines": "baseline_scores",
}
"""verl's names of a batch's columns, and Paddock's."""


class Columns(dict[str, Tensor]):
    """Tensors of equally many rows, with a TensorDict's `batch_size`."""

    @property
    def batch_size(self) -> torch.Size:
        return next((column.shape[:1] for column in self.values()), torch.Size([0]))


@dataclass
class DataProtoItem:
    """One row."""

    batch: dict[str, Tensor] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """`batch` takes any mapping of tensors; it is None where there are none."""

    batch: Any = None
    non_tensor_batch: dict[str, Objects] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch is not None and not isinstance(self.batch, Columns):
            self.batch = Columns(self.batch.items())
        self.check_consistency()

    def check_consistency(self) -> None:
        rows = {name: len(column) for name, column in self._columns()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"columns differ in rows: {rows}")

    def _tensors(self) -> Columns:
        return Columns() if self.batch is None else self.batch

    def _columns(self) -> list[tuple[str, Any]]:
        return [*self._tensors().items(), *self.non_tensor_batch.items()]

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> DataProto:
        arrays = {name: as_array(values) for name, values in (non_tensors or {}).items()}
        return cls(Columns(tensors) if tensors else None, arrays, meta_info or {})

    @classmethod
    def from_single_dict(cls, data: dict[str, Tensor | Objects], meta_info: dict[str, Any] | None = None) -> DataProto:
        """Tensors and arrays in one mapping."""
        if strange := [name for name, column in data.items() if not isinstance(column, Tensor | np.ndarray)]:
            raise ValueError(f"columns {strange} are neither tensors nor arrays")
        tensors = {name: column for name, column in data.items() if isinstance(column, Tensor)}
        arrays = {name: column for name, column in data.items() if isinstance(column, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info)

    def __len__(self) -> int:
        return next((len(column) for _, column in self._columns()), 0)

    def __getitem__(self, item: Any) -> Any:
        """A row by number; rows by slice, list, array or tensor."""
        if isinstance(item, int | np.integer):
            tensors = {name: column[item] for name, column in self._tensors().items()}
            objects = {name: column[item] for name, column in self.non_tensor_batch.items()}
            return DataProtoItem(tensors, objects, self.meta_info)
        return self.select_idxs(torch.arange(len(self))[item] if isinstance(item, slice) else item)

    def select_idxs(self, idxs: Any) -> DataProto:
        """Rows at these positions, or where a mask of booleans is true."""
        index = torch.as_tensor(idxs)
        positions = index.nonzero()[:, 0].cpu() if index.dtype == torch.bool else index.long().cpu()
        tensors = {name: column[positions.to(column.device)] for name, column in self._tensors().items()}
        objects = {name: column[positions.numpy()] for name, column in self.non_tensor_batch.items()}
        return type(self)(tensors if self.batch is not None else None, objects, self.meta_info)

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The named columns; where none are named, all. Objects and settings need not be there."""
        tensors = None
        if self.batch is not None:
            tensors = {name: self.batch[name] for name in (self.batch if batch_keys is None else batch_keys)}
        objects, meta = present(self.non_tensor_batch, non_tensor_batch_keys), present(self.meta_info, meta_info_keys)
        chosen = type(self)(tensors, objects, meta)
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Takes the named columns out, into a batch of their own."""
        tensors = {name: self._tensors().pop(name) for name in batch_keys or ()}
        objects = {name: self.non_tensor_batch.pop(name) for name in non_tensor_batch_keys or ()}
        meta = {name: self.meta_info.pop(name) for name in meta_info_keys or ()}
        return type(self).from_dict(tensors, objects, meta)

    def union(self, other: DataProto) -> DataProto:
        """Adds the other's columns, in place; a name in both must hold the same."""
        for mine, theirs in (
            (self._tensors(), other._tensors()),
            (self.non_tensor_batch, other.non_tensor_batch),
            (self.meta_info, other.meta_info),
        ):
            if clash := [name for name in theirs if name in mine and not same(mine[name], theirs[name])]:
                raise ValueError(f"both batches have {clash}, and they differ")
        tensors, objects = self._tensors() | other._tensors(), self.non_tensor_batch | other.non_tensor_batch
        joined = type(self)(tensors or None, objects, self.meta_info | other.meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
        return self

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row so many times: a a b b, or a b a b where not interleaved."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def reorder(self, indices: Tensor) -> None:
        """In place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """All rows of all batches, with the first one's meta_info."""
        first = data[0]
        if len({frozenset(dict(part._columns())) for part in data}) > 1:
            raise ValueError(f"batches differ in columns: {[sorted(dict(part._columns())) for part in data]}")
        tensors = {name: torch.cat([part.batch[name] for part in data]) for name in first._tensors()}
        objects = {
            name: np.concatenate([part.non_tensor_batch[name] for part in data]) for name in first.non_tensor_batch
        }
        return type(first)(tensors if first.batch is not None else None, objects, first.meta_info)

    def split(self, split_size: int) -> list[DataProto]:
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        if len(self) % chunks:
            raise ValueError(f"{len(self)} rows do not make {chunks} equal parts")
        return self.split(len(self) // chunks)

    def to(self, device: torch.device | str) -> DataProto:
        """In place."""
        if self.batch is not None:
            self.batch = Columns({name: column.to(device) for name, column in self.batch.items()})
        return self


def as_array(values: Any) -> Objects:
    """One object a row, also where the objects are lists."""
    return values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=object, count=len(values))


def present(columns: dict[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    return dict(columns) if names is None else {name: columns[name] for name in names if name in columns}


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor):
        return torch.equal(mine, theirs)
    return mine is theirs or np.array_equal(mine, theirs)


def response_mask_of(data: Any) -> Tensor:
    """1 on the tokens of the response: the attention mask's last columns."""
    width = data.batch["responses"].shape[1]
    attention = data.batch["attention_mask"]
    return attention[:, attention.shape[1] - width :]


def to_batch(data: Any) -> Batch:
    """What Paddock's functions read, of any object with `batch` and, maybe, `non_tensor_batch`.

    Rows are numbered; those of one `uid` are a group, and without `uid` every row is its own.
    """
    columns, objects = data.batch, getattr(data, "non_tensor_batch", {})
    names = set(columns.keys())
    mask = columns["response_mask"] if "response_mask" in names else response_mask_of(data)
    rows = torch.arange(len(mask), device=mask.device)
    found = {ours: columns[theirs] for theirs, ours in COLUMNS.items() if theirs in names}
    prompts = columns["prompts"] if "prompts" in names else mask.new_zeros(len(mask), 0)
    if "attention_mask" in names:
        attention = columns["attention_mask"]
        before = attention.shape[1] - mask.shape[1]
        found |= {"prompt_mask": attention[:, :before], "lengths": attention[:, before:].sum(-1)}
    return Batch(
        row=rows,
        group=group_ids(objects["uid"], mask) if "uid" in objects else rows,
        prompts=prompts,
        mask=mask,
        **found,
        extras={"num_turns" if name == "__num_turns__" else name: values for name, values in objects.items()},
    )
