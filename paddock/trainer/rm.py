"""Reward models from preference pairs: the preferred answer of a pair shall score higher.  Bradley and Terry, 1952"""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from paddock.config.schema import Config
from paddock.core.balance import token_budget_micro_batches
from paddock.core.batch import Batch, PerRow
from paddock.core.device import device_of, seed_all
from paddock.data.dataset import PromptRow
from paddock.data.loader import Loader, validation_batches
from paddock.data.pairs import PairDataset
from paddock.data.transcript import Transcript
from paddock.engines.train.base import LossFn, Outputs
from paddock.engines.train.settings import Budget, actor_settings, model_source
from paddock.engines.train.single import SingleEngine
from paddock.errors import UserError
from paddock.models.adapters import Lora, attach
from paddock.models.packing import sequence_lengths
from paddock.models.reward_head import RewardModel, load_reward_model, save_classifier, scored_batch, sequence_scores
from paddock.models.save import whole_folder
from paddock.trainer.checkpoint import KEY
from paddock.trainer.launch import Launch
from paddock.trainer.lifecycle import Metrics, Outcome
from paddock.trainer.lock import FolderLock
from paddock.trainer.policy import open_tokenizer, require_one_device
from paddock.trainer.sft import EXPORT, SupervisedTrainer, supervise
from paddock.trainer.tracking import Tracker

log = logging.getLogger(__name__)

WANT = frozenset({"values"})
RM = Launch("rm train")


def train_reward_model(config: Config, launch: Launch = RM) -> Outcome:
    """Trains on preference pairs; a finished run leaves its model in the folder `EXPORT`."""
    with FolderLock(config.trainer.default_local_dir) as lock:
        return supervise(open_trainer(config, lock), launch)


def open_trainer(config: Config, lock: FolderLock) -> RewardTrainer:
    require_one_device(config)
    seed_all(config.trainer.seed)
    tokenizer = open_tokenizer(config)
    loader = Loader.train(config.data, PairDataset.train(config.data, tokenizer))
    validation = PairDataset.validation(config.data, tokenizer) if config.data.val_files else None
    total_steps = config.trainer.total_training_steps or loader.steps_per_epoch * config.trainer.total_epochs
    log.info("loading the weights of %s", config.actor_rollout_ref.model.path)
    engine = open_engine(config, tokenizer, total_steps)
    return RewardTrainer(config, engine, loader, validation, lock, tokenizer, total_steps)


def open_engine(config: Config, tokenizer: Any, total_steps: int) -> SingleEngine:
    """A language model with a head of zeros, which finds every answer equally good; or a reward model to train on."""
    device, source = device_of(config.trainer.device), config.actor_rollout_ref.model
    settings = actor_settings(config, device, total_steps)
    where = model_source(source, "actor_rollout_ref.model")
    lora = Lora.of(source, "actor_rollout_ref.model", config.trainer.seed)
    dtype = settings.compute if lora else settings.wide
    model = load_reward_model(**where, dtype=dtype, device=device, fresh_head=True)
    attach(model.backbone, lora, settings.wide)
    return SingleEngine(model.for_pairs(tokenizer.pad_token_id), settings)


class RewardTrainer(SupervisedTrainer):
    part = "reward_model"

    def step(self) -> tuple[Metrics, Batch]:
        """One optimizer step on data.train_batch_size pairs."""
        batch = self.batch(self.loader.next_prompts())
        with self.timer("update_reward_model"):
            micro_batches = [batch.rows(rows) for rows in whole_pairs(batch, self.engine.settings.budget)]
            with self.updating():
                found = self.engine.train_step(micro_batches, preference(len(batch) // 2), WANT)
        metrics = {name if "/" in name else f"train/{name}": value for name, value in found.items()}
        return metrics, batch.with_(lengths=batch.need("lengths") - 1)  # the place behind each answer is no token

    def batch(self, rows: list[PromptRow]) -> Batch:
        return pair_batch(rows, self.model.unread)

    @property
    def model(self) -> RewardModel:
        assert isinstance(self.engine.model, RewardModel)
        return self.engine.model

    def validate(self, tracker: Tracker) -> Metrics:
        """Over all validation pairs: how often the preferred answer scores higher, by how much, and the loss."""
        assert self.validation is not None
        data, margins = self.config.data, list[PerRow]()
        with self.timer("testing"):
            for rows in validation_batches(self.validation, data.val_batch_size or data.train_batch_size):
                batch = self.batch(rows)
                values = self.engine.forward(batch, WANT).values
                assert values is not None
                margins.append(margin(sequence_scores(batch, values)).double())
        found = torch.cat(margins)
        return {
            "val/loss": float(-logsigmoid(found).mean()),
            "val/accuracy": float((found > 0).double().mean()),
            "val/margin": float(found.mean()),
        }

    def export(self) -> Path:
        """As `transformers` and `reward_model.model.path` load it."""
        folder = Path(self.config.trainer.default_local_dir) / EXPORT
        with whole_folder(folder, KEY, replace=True) as writing:
            save_classifier(self.model, writing, dict(self.engine.weights()))
            self.tokenizer.save_pretrained(writing)
        return folder


def pair_batch(rows: list[PromptRow], unread: int | None) -> Batch:
    """Two rows for each pair, the preferred answer first."""
    found = [
        Transcript(row.tokens, answer).without_last(unread)
        for row in rows
        for answer in (row.ground_truth.chosen, row.ground_truth.rejected)
    ]
    batch = scored_batch([each.prompt for each in found], [each.answer for each in found], every_token=False)
    return batch.with_(group=batch.row // 2, extras={"place": [row.place for row in rows for _ in range(2)]})


def whole_pairs(batch: Batch, budget: Budget) -> list[Tensor]:
    """Row positions of micro-batches within the budget; a pair's two rows stay together."""
    tokens = [length - 1 for length in sequence_lengths(batch)]
    pairs = [one + other for one, other in zip(tokens[::2], tokens[1::2], strict=True)]
    if budget.rows is not None:
        return list(torch.arange(len(batch)).split(2 * max(1, budget.rows // 2)))
    if max(pairs) > budget.tokens:
        raise UserError(
            f"the answers of one pair have {max(pairs)} tokens with their prompts, and pass the model together",
            key=budget.key,
            value=budget.tokens,
            fix=f"{max(pairs)} or more, or shorten data.max_prompt_length and data.max_response_length",
        )
    parts = token_budget_micro_batches(pairs, budget.tokens, key=budget.key)
    return [torch.tensor(list(chain.from_iterable((2 * p, 2 * p + 1) for p in part))) for part in parts if part]


def margin(scores: PerRow) -> PerRow:
    """r(preferred) - r(other) of each pair."""
    return scores[::2] - scores[1::2]


def preference(pairs: int) -> LossFn:
    """``-1/N sum log sigmoid(r(x, y_preferred) - r(x, y_other))`` over the N pairs of the whole batch."""

    def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.values is not None
        margins = margin(sequence_scores(micro, outputs.values))
        share = -logsigmoid(margins).sum() / pairs
        found = margins.detach()
        return share, {
            "train/loss": share.detach(),
            "train/accuracy": (found > 0).double().sum() / pairs,
            "train/margin": found.double().sum() / pairs,
        }

    return loss
