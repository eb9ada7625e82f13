"""verl's container of a batch, as plug-ins read and write it: tensors, objects and settings by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paddock.core.batch import Batch
from verl._serialized import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from verl.trainer.ppo._advantages import group_ids
from verl.utils.tensordict_utils import get_tensordict, parts_of

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


class Mismatch(ValueError, AssertionError):
    """Says that columns or batches do not go together; callers of verl's catch an AssertionError."""


class Columns(dict[str, Tensor]):
    """Tensors of equally many rows, with a TensorDict's `batch_size`."""

    rows = 0
    """Rows of a batch without columns."""

    @property
    def batch_size(self) -> torch.Size:
        return next((column.shape[:1] for column in self.values()), torch.Size([self.rows]))

    @classmethod
    def of(cls, columns: Any) -> Columns:
        """Takes any mapping of tensors. One without columns, as a TensorDict may be, keeps its number of rows."""
        found = cls(columns.items())
        size = getattr(columns, "batch_size", ())
        found.rows = int(size[0]) if not found and len(size) else 0
        return found


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
            self.batch = Columns.of(self.batch)
        self.non_tensor_batch = self.non_tensor_batch or {}
        self.check_consistency()

    def check_consistency(self) -> None:
        rows = {name: len(column) for name, column in self._columns()}
        if len(set(rows.values())) > 1:
            raise Mismatch(f"columns differ in rows: {rows}")

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
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Columns of rows. `auto_padding` asks for nothing: rows are cut here by ranks that may have more or fewer."""
        if num_batch_dims != 1:
            raise Mismatch(f"a batch has one dimension of rows, and not {num_batch_dims}")
        arrays = {name: as_array(values) for name, values in (non_tensors or {}).items()}
        return cls(Columns(tensors) if tensors else None, arrays, meta_info or {})

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Tensor | Objects], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
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
                raise Mismatch(f"both batches have {clash}, and they differ")
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
        """All rows of all batches. Settings are joined: metrics to lists, and others must agree."""
        first = data[0]
        if len({frozenset(dict(part._columns())) for part in data}) > 1:
            raise Mismatch(f"batches differ in columns: {[sorted(dict(part._columns())) for part in data]}")
        tensors = {name: torch.cat([part.batch[name] for part in data]) for name in first._tensors()}
        objects = {
            name: np.concatenate([part.non_tensor_batch[name] for part in data]) for name in first.non_tensor_batch
        }
        settings = joined_settings([part.meta_info for part in data])
        return type(first)(tensors if first.batch is not None else None, objects, settings)

    def split(self, split_size: int) -> list[DataProto]:
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        if len(self) % chunks:
            raise Mismatch(f"{len(self)} rows do not make {chunks} equal parts")
        return self.split(len(self) // chunks)

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> DataProto:
        """Gives tensors other names, in place."""
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        names = dict(zip(old, new, strict=True))
        self.batch = Columns({names.get(name, name): column for name, column in self._tensors().items()})
        return self

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        return self[start:end:step]  # type: ignore[no-any-return]

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Each row as often as its own number says."""
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(torch.as_tensor(repeat_times)))

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> DataProto:
        """Each row as `n_split` rows: the named columns are cut along their second dimension, the others repeated."""
        chosen = set(split_keys or ())
        columns = {
            name: column.reshape(-1, column.shape[1] // n_split, *column.shape[2:])
            if name in chosen
            else column.repeat_interleave(n_split, dim=0)
            for name, column in self._tensors().items()
        }
        objects = {
            name: np.array([part for row in column for part in np.split(np.array(row, dtype=object), n_split)])
            if name in chosen
            else np.repeat(column, n_split, axis=0)
            for name, column in self.non_tensor_batch.items()
        }
        return type(self)(columns if self.batch is not None else None, objects, self.meta_info)

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Any = None
    ) -> Iterator[DataProto]:
        """Batches of so many rows, in an order of each epoch's own; `dataloader_kwargs` may say shuffle=False."""
        if len(self) % mini_batch_size:
            raise Mismatch(f"{len(self)} rows do not make batches of {mini_batch_size}")
        generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator)
            if not (dataloader_kwargs or {}).get("shuffle", True):
                order = torch.arange(len(self))
            yield from self.select_idxs(order).split(mini_batch_size)

    def save_to_disk(self, filepath: str) -> None:
        with open(filepath, "wb") as file:
            pickle.dump(self, file)

    @staticmethod
    def load_from_disk(filepath: str) -> DataProto:
        """Reads a batch that `save_to_disk` wrote; a pickle runs code: read your own files alone."""
        with open(filepath, "rb") as file:
            return pickle.load(file)  # type: ignore[no-any-return]

    def to_tensordict(self) -> Any:
        """Returns a TensorDict of all columns and settings (package tensordict)."""
        return get_tensordict(
            {**self._tensors(), **{name: list(column) for name, column in self.non_tensor_batch.items()}},
            self.meta_info,
        )

    @classmethod
    def from_tensordict(cls, tensordict: Any) -> DataProto:
        """Takes a TensorDict: stacks of objects are columns, single ones settings."""
        return cls.from_dict(*parts_of(tensordict))

    def to(self, device: torch.device | str) -> DataProto:
        """In place."""
        if self.batch is not None:
            self.batch = Columns({name: column.to(device) for name, column in self.batch.items()})
        return self


def joined_settings(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the settings of several batches. `metrics`, a dict or a list of them, become lists by name."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name == "metrics":
                lists = found.setdefault(name, {})
                for metrics in value if isinstance(value, list) else [value]:
                    for key, number in metrics.items():
                        lists.setdefault(key, []).append(number)
            elif name in found and not same(found[name], value):
                raise Mismatch(f"batches differ in the setting {name!r}: {found[name]!r} and {value!r}")
            else:
                found[name] = value
    return found


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Returns the batch with rows of its beginning added until their number is a multiple, and how many were added."""
    added = -len(data) % size_divisor
    return data.select_idxs(torch.arange(len(data) + added) % max(len(data), 1)), added


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    return data[: len(data) - pad_size] if pad_size else data  # type: ignore[no-any-return]


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Returns a batch of fewer rows, each of which holds several."""
    shape = (new_batch_size, len(data) // new_batch_size)
    return _reshaped(data, lambda column: column.reshape(*shape, *column.shape[1:]))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Returns a batch whose first dimensions are one."""
    return _reshaped(data, lambda column: column.reshape(-1, *column.shape[batch_dims:]))


def _reshaped(data: DataProto, change: Callable[[Any], Any]) -> DataProto:
    columns = {name: change(column) for name, column in data._tensors().items()}
    objects = {name: change(column) for name, column in data.non_tensor_batch.items()}
    return type(data)(columns if data.batch is not None else None, objects, data.meta_info)


def union_tensor_dict(tensor_dict1: Any, tensor_dict2: Any) -> Any:
    """Adds the second's tensors to the first, in place; a name in both must hold the same."""
    return _union(tensor_dict1, tensor_dict2)


def union_numpy_dict(tensor_dict1: dict[str, Objects], tensor_dict2: dict[str, Objects]) -> dict[str, Objects]:
    """Adds the second's arrays to the first, in place; a name in both must hold the same, also nan for nan."""
    return _union(tensor_dict1, tensor_dict2)


def _union(mine: Any, theirs: Any) -> Any:
    for name, value in theirs.items():
        if name in mine.keys() and not same(mine[name], value):  # noqa: SIM118, a TensorDict has no other way to ask
            raise Mismatch(f"both have {name!r}, and they differ")
        mine[name] = value
    return mine


def as_array(values: Any) -> Objects:
    """One object a row, also where the objects are lists."""
    return values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=object, count=len(values))


def present(columns: dict[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    return dict(columns) if names is None else {name: columns[name] for name in names if name in columns}


def same(mine: Any, theirs: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """True if two values are equal, objects in arrays and nan included. `seen`: pairs that are being compared."""
    if mine is theirs or (id(mine), id(theirs)) in seen:
        return True
    if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
        return isinstance(mine, Tensor) and isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    seen |= {(id(mine), id(theirs))}
    if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray):
        both = isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) and mine.shape == theirs.shape
        return both and all(same(a, b, seen) for a, b in zip(mine.flat, theirs.flat, strict=True))
    if isinstance(mine, float | np.floating) and isinstance(theirs, float | np.floating) and mine != mine:
        return bool(theirs != theirs)
    return bool(np.array_equal(mine, theirs))


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


__all__ = [
    "Columns",
    "DataProto",
    "DataProtoItem",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "to_batch",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
