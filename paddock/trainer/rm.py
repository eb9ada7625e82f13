"""Reward models from preference pairs: the preferred answer of a pair shall score higher.  Bradley and Terry, 1952"""

from __future__ import annotations

import logging
from functools import cached_property

import torch
from torch.nn.functional import logsigmoid

from paddock.config.schema import Config
from paddock.config.topology import PAIRS
from paddock.core.batch import Batch, PerRow
from paddock.data.dataset import PromptRow
from paddock.data.loader import validation_batches
from paddock.data.pairs import PairDataset
from paddock.data.transcript import Transcript
from paddock.models.reward_head import scored_batch, sequence_scores
from paddock.runs.record import Launch
from paddock.runs.tracking import Tracker
from paddock.trainer.lifecycle import Metrics, Outcome
from paddock.trainer.sft import SupervisedTrainer, kind_of
from paddock.trainer.training import train
from paddock.workers.supervised import margin
from paddock.workers.updates import one_step_plan

log = logging.getLogger(__name__)

WANT = frozenset({"values"})


class RewardTrainer(SupervisedTrainer):
    """Trains a reward model."""

    part = "reward_model"
    role = PAIRS
    rows = PairDataset

    def step(self) -> tuple[Metrics, Batch]:
        """Takes one optimizer step on data.train_batch_size pairs."""
        batch = self.batch(self.loader.next_prompts())
        with self.timer("update_reward_model"), self.updating():
            metrics = self.learner.learn(batch, one_step_plan(batch, self.step_no))
        return metrics, batch.with_(lengths=batch.need("lengths") - 1)  # the place behind each answer is no token

    def batch(self, rows: list[PromptRow]) -> Batch:
        return pair_batch(rows, self.unread)

    @cached_property
    def unread(self) -> int | None:
        return self.learner.unread()

    def validate(self, tracker: Tracker) -> Metrics:
        """Over all validation pairs: how often the preferred answer scores higher, by how much, and the loss."""
        assert self.validation is not None
        data, margins = self.config.data, list[PerRow]()
        with self.timer("testing"):
            for rows in validation_batches(self.validation, data.val_batch_size or data.train_batch_size):
                batch = self.batch(rows)
                values = self.learner.forward(batch, WANT).values
                assert values is not None
                margins.append(margin(sequence_scores(batch, values)).double())
        found = torch.cat(margins)
        return {
            "val/loss": float(-logsigmoid(found).mean()),
            "val/accuracy": float((found > 0).double().mean()),
            "val/margin": float(found.mean()),
        }


PAIR_TRAINING = kind_of(RewardTrainer, "rm train")


def train_reward_model(config: Config, launch: Launch | None = None) -> Outcome:
    """Trains on preference pairs."""
    return train(config, PAIR_TRAINING, launch or Launch(PAIR_TRAINING.command))


def pair_batch(rows: list[PromptRow], unread: int | None) -> Batch:
    """Two rows for each pair, the preferred answer first."""
    found = [
        Transcript(row.tokens, answer).without_last(unread)
        for row in rows
        for answer in (row.ground_truth.chosen, row.ground_truth.rejected)
    ]
    batch = scored_batch([each.prompt for each in found], [each.answer for each in found], every_token=False)
    return batch.with_(group=batch.row // 2, extras={"location": [row.location for row in rows for _ in range(2)]})
