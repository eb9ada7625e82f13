"""Which prompts come next. The order is a function of (seed, epoch), so a checkpoint keeps just a place in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from paddock.config.schema import DataConfig
from paddock.core.batch import Batch
from paddock.core.rng import permutation
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.mixture import Mixture
from paddock.data.plugins import Order
from paddock.errors import UserError

EXTRAS = ("data_source", "ground_truth", "extra_info", "messages", "index", "location", "style", "images",
          "written_prompt")  # fmt: skip
"""What a batch of prompts carries beside tokens."""


class Loader:
    """Draws training prompts, epoch after epoch; the end of an epoch that is shorter than a draw is left out."""

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        look_ahead: bool = True,
        sampler: Order | None = None,
        weights: Sequence[float] | None = None,
    ):
        """`sampler` decides the order, where the user has one; `weights` how often each file of the data set comes.

        `look_ahead` tokenises the next batch in a thread while this one is trained on: one thread is enough, as the
        tokenizer's own native threads share its work. A `data.dataloader_num_workers` above 0 asks for it.
        """
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.sampler, self.weights = sampler, None if weights is None else [float(weight) for weight in weights]
        self.mixture = Mixture(dataset.rows_of_entries, weights, seed, shuffle) if weights else None
        self._ahead = LookAhead(dataset) if look_ahead else None
        self._start(0, 0)
        self._require(batch_size, "data.train_batch_size")

    @classmethod
    def train(cls, config: DataConfig, dataset: PromptDataset) -> Loader:
        look_ahead = config.dataloader_num_workers > 0
        sampler = Order(config, dataset) if config.sampler.class_path else None
        return cls(dataset, config.train_batch_size, seed=config.seed or 0, shuffle=config.shuffle,
                   look_ahead=look_ahead, sampler=sampler, weights=config.train_weights)  # fmt: skip

    @property
    def steps_per_epoch(self) -> int:
        return len(self.order) // self.batch_size

    def __iter__(self) -> Iterator[list[PromptRow]]:
        """Yields the batches that are left of this epoch."""
        epoch = self.epoch
        while self.epoch == epoch and self._remaining() >= self.batch_size:
            yield self.next_prompts()
        if self.epoch == epoch:
            self._start(epoch + 1, 0)

    def next_prompts(self, count: int | None = None) -> list[PromptRow]:
        """Returns the next `count` prompts, by default a batch; a new epoch begins where this one has fewer left."""
        count = self.batch_size if count is None else count
        self._require(count, "data.gen_batch_size")
        if self._remaining() < count:
            self._start(self.epoch + 1, 0)
        chosen = slice(self.position, self.position + count)
        positions, passes = self._positions(chosen), self.passes[chosen]
        self.position += count
        rows = self._ahead.take(positions) if self._ahead else self.dataset.rows(positions)
        if self._ahead and self._remaining() >= count:
            self._ahead.expect(self._positions(slice(self.position, self.position + count)))
        total = self.dataset.total
        return [replace(row, group=int(again) * total + row.index) for row, again in zip(rows, passes, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved place, if it is a place in the same order of the same rows."""
        mine = self._identity()
        for name, (key, what) in SAME.items():
            if state.get(name) != mine[name]:
                raise UserError(
                    f"the checkpoint was made with {what}, and its place among the prompts means nothing here",
                    key=key,
                    value=None if name == "data" else mine[name],
                    fix="restore what it was" + ("" if name == "data" else f" ({key}={state.get(name)})")
                    + ", or start afresh: trainer.resume_mode=disable",
                )  # fmt: skip
        self._start(state["epoch"], state["position"])

    def _require(self, count: int, key: str) -> None:
        if not 0 < count <= len(self.order):
            reason = f"{self.dataset.key} gives {len(self.order)} prompts in all"
            raise UserError(reason, key=key, value=count, fix=f"at most {len(self.order)}")

    def _identity(self) -> dict[str, Any]:
        identity = {"data": self.dataset.identity, "seed": self.seed, "shuffle": self.shuffle, "weights": self.weights}
        return identity | {"sampler": self.sampler.name if self.sampler else None}

    def _start(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self.order: np.ndarray
        self.passes: np.ndarray
        """How often each row of the order came before: its draws have ids of their own."""
        if self.mixture:
            self.order, self.passes = self.mixture(epoch)
            return
        if self.sampler:
            self.order = np.array(self.sampler(epoch))
        else:
            count = len(self.dataset)
            self.order = permutation(count, self.seed, epoch).numpy() if self.shuffle else np.arange(count)
        self.passes = np.broadcast_to(np.int64(epoch), len(self.order))

    def _positions(self, chosen: slice) -> list[int]:
        return [int(position) for position in self.order[chosen]]

    def _remaining(self) -> int:
        return len(self.order) - self.position


SAME = {
    "data": ("data.train_files", "other training prompts"),
    "seed": ("data.seed", "another seed"),
    "shuffle": ("data.shuffle", "another order"),
    "sampler": ("data.sampler.class_path", "another sampler"),
    "weights": ("data.train_weights", "other weights"),
}


class LookAhead:
    """Tokenises what will probably be asked for next. A wrong guess costs time and changes nothing."""

    def __init__(self, dataset: PromptDataset):
        self.dataset = dataset
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self.guess: list[int] = []
        self.pending: Future[list[PromptRow]] | None = None

    def expect(self, positions: list[int]) -> None:
        self.guess, self.pending = positions, self.thread.submit(self.dataset.rows, positions)

    def take(self, positions: list[int]) -> list[PromptRow]:
        if self.pending and self.guess == positions:
            return self.pending.result()
        return self.dataset.rows(positions)


def validation_batches(
    dataset: PromptDataset, batch_size: int | None = None, *, shuffle: bool = False, seed: int = 0
) -> Iterator[list[PromptRow]]:
    """Yields every row once, the last batch maybe smaller. Ids are the same each time, whatever the order."""
    order = permutation(len(dataset), seed, 0).tolist() if shuffle else list(range(len(dataset)))
    size = batch_size or len(order)
    return (dataset.rows(order[start : start + size]) for start in range(0, len(order), size))


def columns_of(row: PromptRow) -> dict[str, Any]:
    """Returns what a row says, by the names of a batch's columns."""
    return {name: getattr(row, name) for name in EXTRAS}


def prompt_batch(rows: list[PromptRow], samples: int, pad_token: int) -> Batch:
    """Returns `samples` rows for each prompt, side by side: row = group * samples + sample. Padding is on the left."""
    prompts, mask = (column.repeat(samples, 0) for column in left_padded([row.tokens for row in rows], pad_token))
    groups = torch.tensor([row.group for row in rows])
    return Batch(
        row=(groups[:, None] * samples + torch.arange(samples)).flatten(),
        group=groups.repeat_interleave(samples),
        prompts=torch.from_numpy(prompts),
        prompt_mask=torch.from_numpy(mask),
        extras={name: [getattr(row, name) for row in rows for _ in range(samples)] for name in EXTRAS},
    )


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of prompts as rows that end together, and a mask that is 1 on them and 0 on padding."""
    lengths = np.array([len(tokens) for tokens in prompts])
    inside = np.arange(lengths.max() - 1, -1, -1) < lengths[:, None]  # by numpy: torch reads lists of numbers slowly
    tokens = np.full(inside.shape, pad, np.int64)
    tokens[inside] = np.fromiter(chain.from_iterable(prompts), np.int64, lengths.sum())
    return tokens, inside.astype(np.int64)
