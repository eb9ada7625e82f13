"""Supervised training, with the engine and checkpoints of `train`: a policy learns the answers of rows; a reward model
learns from preference pairs that the preferred answer scores higher.  Bradley and Terry, 1952
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from paddock.config import tree
from paddock.config.schema import Config
from paddock.config.topology import ANSWERS, PAIRS, supervised_pools
from paddock.core.batch import Batch
from paddock.core.files import whole_folder
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.loader import Loader, prompt_batch, validation_batches
from paddock.data.pairs import PairDataset
from paddock.data.transcript import Transcript
from paddock.data.unscored import AnswerDataset, Turns
from paddock.engines.rollout.base import Prompt
from paddock.models.load import open_tokenizer
from paddock.models.reward_head import scored_batch, sequence_scores
from paddock.rollouts.batch import with_responses
from paddock.rollouts.episode import Episode, Span
from paddock.runs.checkpoint import KEY
from paddock.runs.tracking import Tracker
from paddock.trainer.lifecycle import Metrics, RunFolder, State, TrainingRun
from paddock.trainer.performance import throughput_metrics, timing_metrics, token_counts
from paddock.trainer.run import RunKind
from paddock.workers.roles import build_learner
from paddock.workers.sharded import ShardedLearner
from paddock.workers.supervised import Learner, margin
from paddock.workers.updates import one_step_plan

log = logging.getLogger(__name__)

EXPORT = "huggingface"


class SupervisedTrainer(TrainingRun):
    """Trains one model on rows whose answers are given."""

    part = "actor"
    """The folder of the model in a checkpoint."""
    role = ANSWERS
    memory_by: ClassVar[Mapping[str, str]] = {"update_reward_model": "update_actor", "testing": "old_log_prob"}
    rows: type[PromptDataset] = AnswerDataset

    def __init__(
        self, config: Config, learner: Learner | ShardedLearner, loader: Loader, validation: PromptDataset | None,
        folder: RunFolder, tokenizer: Any, total_steps: int,
    ):  # fmt: skip
        super().__init__(config.trainer, tree.settings(config), loader, folder, total_steps, validation is not None)
        self.data, self.learner, self.validation, self.tokenizer = config.data, learner, validation, tokenizer

    def step(self) -> tuple[Metrics, Batch]:
        """Takes one optimizer step on data.train_batch_size rows."""
        batch = self.batch(self.loader.next_prompts())
        with self.timer("update_actor"), self.updating():
            return self.learner.learn(batch, one_step_plan(batch, self.step_no)), batch

    def batch(self, rows: list[PromptRow]) -> Batch:
        return answer_batch(rows, self.tokenizer.pad_token_id)

    def validate(self, tracker: Tracker) -> Metrics:
        """Returns the mean over all tokens of all validation answers."""
        total, tokens = 0.0, 0.0
        for batch, log_probs in self.computed("log_probs"):
            total -= float(log_probs.double().sum())
            tokens += float(batch.need("mask").sum())
        return {"val/loss": total / tokens}

    def computed(self, column: str) -> Iterator[tuple[Batch, Tensor]]:
        """Yields the validation rows batch by batch, with what the model computes for them."""
        assert self.validation is not None
        size = self.data.val_batch_size or self.data.train_batch_size
        with self.timer("testing"):
            for rows in validation_batches(self.validation, size):
                batch = self.batch(rows)
                yield batch, getattr(self.learner.forward(batch, frozenset({column})), column)

    def cost(self, batch: Batch) -> Metrics:
        responses, tokens = token_counts(batch)
        position = {"training/global_step": float(self.step_no), "training/epoch": float(self.loader.epoch)}
        speed = throughput_metrics(tokens, self.timer.seconds["step"], self.learner.devices)
        return position | timing_metrics(self.timer, responses, tokens) | speed

    def devices(self) -> str:
        return f"{self.learner.devices} x {self.learner.device_name()}"

    def rows_of(self, batch: Batch) -> str:
        return "rows of the last: " + ", ".join(batch.extras["location"][:8])

    def save_weights(self, folder: Path) -> None:
        (folder / self.part).mkdir()
        self.learner.save(folder / self.part)
        self.tokenizer.save_pretrained(folder / self.part)

    def load_weights(self, folder: Path, state: State) -> None:
        self.learner.load(folder / self.part)

    def export(self) -> Path:
        """Exports the model in the type it computes in, and its tokenizer, as `transformers` loads them."""
        folder = Path(self.keys.default_local_dir) / EXPORT
        with whole_folder(folder, KEY, replace=True) as writing:
            self.learner.export(writing)
            self.tokenizer.save_pretrained(writing)
        return folder


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
        """Returns how often the preferred answer of a validation pair scores higher, by how much, and the loss."""
        batches = self.computed("values")
        margins = torch.cat([margin(sequence_scores(batch, values)).double() for batch, values in batches])
        return {
            "val/loss": float(-logsigmoid(margins).mean()),
            "val/accuracy": float((margins > 0).double().mean()),
            "val/margin": float(margins.mean()),
        }


def kind_of(trainer: type[SupervisedTrainer], command: str) -> RunKind:
    """Returns how a supervised trainer is opened and ended; a finished run leaves its model in the folder `EXPORT`."""

    def open_trainer(config: Config, folder: RunFolder, things: ExitStack) -> SupervisedTrainer:
        config = copy.deepcopy(config)
        config.actor_rollout_ref.rollout.temperature = 1.0  # the likelihood is of the model's own distribution
        tokenizer = open_tokenizer(config.actor_rollout_ref.model, config.data)
        loader = Loader.train(config.data, trainer.rows.train(config.data, tokenizer))
        validation = trainer.rows.validation(config.data, tokenizer) if config.data.val_files else None
        total_steps = config.trainer.steps(loader.steps_per_epoch)
        log.info("loading the weights of %s", config.actor_rollout_ref.model.path)
        learner, close = build_learner(config, trainer.role, config.trainer.total_training_steps or total_steps)
        things.callback(close)
        return trainer(config, learner, loader, validation, folder, tokenizer, total_steps)

    return RunKind(command, partial(supervised_pools, role=trainer.role), open_trainer, trainer.export)


FINE_TUNING = kind_of(SupervisedTrainer, "sft")
REWARD_MODELLING = kind_of(RewardTrainer, "rm train")


def answer_batch(rows: list[PromptRow], pad_token: int) -> Batch:
    """Returns prompts with their answers as responses; what the assistant wrote counts."""
    batch = prompt_batch(rows, 1, pad_token)
    answers = [
        Episode(row.group, row, Prompt(row.tokens, [row.group]), spans_of(row.ground_truth), done=True) for row in rows
    ]
    return with_responses(batch, answers, pad_token)


def spans_of(answer: list[int] | Turns) -> list[Span]:
    """Returns an answer as spans of given tokens: those of the assistant as if it had drawn them with certainty."""
    stretches = answer.stretches if isinstance(answer, Turns) else ((answer, True),)
    return [Span(tokens, [0.0] * len(tokens), version=0) if own else Span(tokens) for tokens, own in stretches]


def pair_batch(rows: list[PromptRow], unread: int | None) -> Batch:
    """Returns two rows for each pair, the preferred answer first."""
    found = [
        Transcript(row.tokens, answer).without_last(unread)
        for row in rows
        for answer in (row.ground_truth.chosen, row.ground_truth.rejected)
    ]
    batch = scored_batch([each.prompt for each in found], [each.answer for each in found], every_token=False)
    return batch.with_(group=batch.row // 2, extras={"location": [row.location for row in rows for _ in range(2)]})
