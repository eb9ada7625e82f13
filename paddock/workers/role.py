"""A role that trains or scores with one model in this process: forward passes, updates, offload, checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from paddock.algorithms.rollout_gap import gap_metrics
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.device import device_name
from paddock.core.garbage import collecting_new_objects
from paddock.core.masked import Denominators
from paddock.engines.train.base import Outputs, Residency, Want
from paddock.engines.train.engine import Engine
from paddock.errors import UserError
from paddock.workers.updates import Average, Metrics, UpdatePlan


class MovingWeights(ABC):
    """A role whose weights, as far as its offload keys name them, are on the device only while it works."""

    @abstractmethod
    def move(self, where: Residency) -> None:
        """Moves the offloadable weights, or begins to."""

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Moves the role's weights to its device for the block; afterwards offloads what its offload keys name."""
        self.move("device")
        try:
            yield
        finally:
            self.move("host")

    def prefetch(self) -> None:
        """Starts the copy of the role's offloaded weights to the device, and does not wait for it."""
        self.move("prefetch")


class Role(MovingWeights):
    """A model and its engine."""

    def __init__(self, engine: Engine, name: str):
        self.engine, self.name = engine, name

    def move(self, where: Residency) -> None:
        self.engine.move(where)

    def forward(self, batch: Batch, want: Want) -> Outputs:
        with self.on_device():
            return self.engine.forward(batch, want)

    def device_name(self) -> str:
        return device_name(self.engine.device)

    @property
    def devices(self) -> int:
        return 1

    def shares_of(self, batch: Batch) -> list[list[int]]:
        """Returns the rows of each share of a forward pass: here one share has them all."""
        return [list(range(len(batch)))]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """What the loss of a micro-batch must know about the mini-batch around it."""

    rows: PerRow
    """Ids of the rows that this process has of it."""
    denominators: Denominators
    uses_old_log_probs: bool
    selected: PerToken | None = None
    """1 on the tokens that the loss treats apart, in the order of `rows`."""


class TrainedRole(Role):
    """A role with an optimizer. `learn` is what one rank of many runs of its share of an update."""

    wants: Want
    """Outputs of the forward pass that the loss reads."""
    rows_together = 1
    """Neighbouring rows that no cut may separate."""

    def __init__(self, engine: Engine, name: str, prefix: str | None = None):
        super().__init__(engine, name)
        self.prefix = prefix or name
        """First part of the names of metrics."""
        self.version = 0
        """Counts updates of the weights over the whole run: tokens and copies of the weights tell by it how old they
        are."""

    @abstractmethod
    def loss(self, mini: MiniBatch, micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns a micro-batch's share of the loss and of each metric."""

    def select(self, rows: Batch, plan: UpdatePlan) -> PerToken | None:
        """Returns the tokens that the loss treats apart, if it chooses them by statistics of the whole mini-batch."""
        return None

    def micro_batches(self, mini: Batch) -> list[Batch]:
        return self.engine.micro_batches(mini)

    def learn(self, batch: Batch, plan: UpdatePlan) -> Metrics:
        """Takes one optimizer step for each mini-batch; returns the means of their metrics."""
        seen = Average()
        with self.on_device(), collecting_new_objects():
            for mini in plan.minis:
                rows = batch.rows(mini.rows)
                whole = MiniBatch(rows.row, mini.denominators, plan.uses_old_log_probs, self.select(rows, plan))
                totals = self.engine.train_step(self.micro_batches(rows), partial(self.loss, whole), self.wants)
                metrics = gap_metrics(totals, mini.denominators.tokens)
                seen.add({name if "/" in name else f"{self.prefix}/{name}": value for name, value in metrics.items()})
        self.engine.advance()
        self.version += 1
        return seen.means()

    def save(self, path: Path) -> None:
        """Writes weights and optimizer into a folder that the trainer made, which every rank must see."""
        if not path.is_dir():
            raise UserError(
                f"the process of the {self.name} does not see {path}",
                key="trainer.default_local_dir",
                fix="a folder that all nodes share",
            )
        self.engine.save(path)

    def load(self, path: Path, version: int | None = None) -> None:
        """Reads what `save` wrote; `version`: that of the weights, else the next."""
        self.engine.load(path)
        self.version = self.version + 1 if version is None else version


def end_tokens(engine: Engine) -> frozenset[int]:
    """Returns the tokens that the model's own generation config names: an end of turn, say."""
    named = getattr(engine.rollout_model.generation_config, "eos_token_id", None)
    return frozenset(token for token in (named if isinstance(named, list) else [named]) if token is not None)


def with_end_of_text(ends: frozenset[int], tokenizer: Any) -> frozenset[int]:
    """Adds the tokenizer's end of text to the tokens that the model names."""
    return ends if tokenizer.eos_token_id is None else ends | {tokenizer.eos_token_id}


def stop_tokens(engine: Engine, tokenizer: Any) -> frozenset[int]:
    return with_end_of_text(end_tokens(engine), tokenizer)
