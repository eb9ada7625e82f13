"""Supervised training: a model learns the answers of prompt/answer rows, with the engine and checkpoints of `train`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.device import device_name, seed_all
from paddock.core.masked import Denominators, aggregate
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.loader import Loader, prompt_batch, validation_batches
from paddock.data.unscored import AnswerDataset
from paddock.engines.rollout.base import Completion
from paddock.engines.train.base import LossFn, Outputs
from paddock.engines.train.single import SingleEngine
from paddock.models.save import whole_folder
from paddock.trainer.checkpoint import KEY, checkpoint_store, resume_point
from paddock.trainer.experience import with_responses
from paddock.trainer.launch import Launch, record_launch
from paddock.trainer.lifecycle import Metrics, Outcome, TrainingRun
from paddock.trainer.lock import FolderLock
from paddock.trainer.performance import throughput_metrics, token_counts
from paddock.trainer.policy import open_tokenizer, require_one_device
from paddock.trainer.tracking import Tracker

log = logging.getLogger(__name__)

WANT = frozenset({"log_probs"})
EXPORT = "huggingface"
SFT = Launch("sft")


def fine_tune(config: Config, launch: Launch = SFT) -> Outcome:
    """Trains on prompt/answer rows; a finished run leaves its model in the folder `EXPORT`."""
    with FolderLock(config.trainer.default_local_dir) as lock:
        return supervise(open_trainer(config, lock), launch)


def supervise(trainer: SupervisedTrainer, launch: Launch) -> Outcome:
    """Goes on from the newest checkpoint, trains to the last step, and exports the model."""
    config, store = trainer.config, trainer.store
    checkpoint = resume_point(config.trainer, store)
    state = trainer.restore(checkpoint) if checkpoint else None
    with Tracker(config, trainer.total_steps, checkpoint.step if checkpoint else None, state) as tracker:
        record_launch(config, launch, trainer.devices(), trainer.step_no)
        outcome = trainer.fit(tracker)
        if outcome.finished:
            trainer.export()
        return outcome


def open_trainer(config: Config, lock: FolderLock) -> SupervisedTrainer:
    require_one_device(config)
    seed_all(config.trainer.seed)
    config.actor_rollout_ref.rollout.temperature = 1.0  # the likelihood is of the model's own distribution
    tokenizer = open_tokenizer(config)
    loader = Loader.train(config.data, AnswerDataset.train(config.data, tokenizer))
    validation = AnswerDataset.validation(config.data, tokenizer) if config.data.val_files else None
    total_steps = config.trainer.total_training_steps or loader.steps_per_epoch * config.trainer.total_epochs
    log.info("loading the weights of %s", config.actor_rollout_ref.model.path)
    engine = SingleEngine.for_actor(config, total_steps)
    return SupervisedTrainer(config, engine, loader, validation, lock, tokenizer, total_steps)


class SupervisedTrainer(TrainingRun):
    """Trains one model on rows whose answers are given."""

    part = "actor"
    """The folder of the model in a checkpoint."""

    def __init__(
        self, config: Config, engine: SingleEngine, loader: Loader, validation: PromptDataset | None,
        lock: FolderLock, tokenizer: Any, total_steps: int,
    ):  # fmt: skip
        super().__init__(config, loader, checkpoint_store(config), total_steps, lock, validates=validation is not None)
        self.engine, self.validation, self.tokenizer = engine, validation, tokenizer

    def step(self) -> tuple[Metrics, Batch]:
        """One optimizer step on data.train_batch_size rows."""
        batch = self.batch(self.loader.next_prompts())
        with self.timer("update_actor"), self.updating():
            found = self.engine.train_step(self.engine.micro_batches(batch), likelihood(batch), WANT)
        return {name if "/" in name else f"train/{name}": value for name, value in found.items()}, batch

    def batch(self, rows: list[PromptRow]) -> Batch:
        return answer_batch(rows, self.tokenizer.pad_token_id)

    def validate(self, tracker: Tracker) -> Metrics:
        """The mean over all tokens of all validation answers."""
        assert self.validation is not None
        data, total, tokens = self.config.data, 0.0, 0.0
        with self.timer("testing"):
            for rows in validation_batches(self.validation, data.val_batch_size or data.train_batch_size):
                batch = self.batch(rows)
                log_probs = self.engine.forward(batch, WANT).log_probs
                assert log_probs is not None
                total -= float(log_probs.double().sum())
                tokens += float(batch.need("mask").sum())
        return {"val/loss": total / tokens}

    def cost(self, batch: Batch) -> Metrics:
        responses, tokens = token_counts(batch)
        position = {"training/global_step": float(self.step_no), "training/epoch": float(self.loader.epoch)}
        speed = throughput_metrics(tokens, self.timer.seconds["step"], 1)
        return position | self.timer.metrics(responses, tokens) | speed

    def devices(self) -> str:
        return f"1 x {device_name(self.engine.device)}"

    def rows_of(self, batch: Batch) -> str:
        return "rows of the last: " + ", ".join(batch.extras["place"][:8])

    def save_weights(self, folder: Path) -> None:
        self.engine.save(folder / self.part)
        self.tokenizer.save_pretrained(folder / self.part)

    def load_weights(self, folder: Path) -> None:
        self.engine.load(folder / self.part)

    def export(self) -> Path:
        """The model in the type it computes in, and its tokenizer, as `transformers` loads them."""
        folder = Path(self.config.trainer.default_local_dir) / EXPORT
        with whole_folder(folder, KEY, replace=True) as writing:
            weights = {name: tensor.contiguous() for name, tensor in self.engine.weights()}
            self.engine.backbone.save_pretrained(writing, state_dict=weights)
            self.tokenizer.save_pretrained(writing)
        return folder


def answer_batch(rows: list[PromptRow], pad_token: int) -> Batch:
    """Prompts with their answers as responses, every token of which counts."""
    batch = prompt_batch(rows, 1, pad_token)
    ids = zip(batch.row.tolist(), rows, strict=True)
    answers = [Completion(number, row.ground_truth, [0.0] * len(row.ground_truth), True) for number, row in ids]
    return with_responses(batch, answers, pad_token)


def likelihood(batch: Batch) -> LossFn:
    """``-1/T sum_t log p(y_t | x, y_<t)`` over the T answer tokens of the whole batch: micro-batches add up to it."""
    denominators = Denominators.count(batch.need("mask"))

    def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.log_probs is not None
        share = aggregate(-outputs.log_probs, micro.need("mask"), "token-mean", denominators)
        return share, {"train/loss": share.detach()}

    return loss
