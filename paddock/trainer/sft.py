"""Supervised training: a model learns the answers of prompt/answer rows, with the engine and checkpoints of `train`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.device import seed_all
from paddock.core.masked import Denominators, aggregate
from paddock.core.timing import Timer
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.loader import Loader, prompt_batch, validation_batches
from paddock.data.unscored import AnswerDataset
from paddock.engines.rollout.base import Completion
from paddock.engines.train.base import LossFn, Outputs
from paddock.engines.train.single import SingleEngine
from paddock.errors import UserError
from paddock.models.save import whole_folder
from paddock.trainer.checkpoint import KEY, Checkpoint, CheckpointStore, checkpoint_store, resume_point
from paddock.trainer.experience import with_responses
from paddock.trainer.interruption import Interruption
from paddock.trainer.performance import throughput_metrics, token_counts
from paddock.trainer.policy import open_tokenizer, require_one_device
from paddock.trainer.state import check_config, flat, load_state, restore_rng, rng_state, save_state
from paddock.trainer.tracking import Tracker

log = logging.getLogger(__name__)

Metrics = dict[str, float]
WANT = frozenset({"log_probs"})
EXPORT = "huggingface"


def fine_tune(config: Config) -> Path | None:
    """The folder of the finished model; None when it was interrupted and a checkpoint waits."""
    require_one_device(config)
    seed_all(config.trainer.seed)
    config.actor_rollout_ref.rollout.temperature = 1.0  # the likelihood is of the model's own distribution
    tokenizer = open_tokenizer(config)
    loader = Loader.train(config.data, AnswerDataset.train(config.data, tokenizer))
    validation = AnswerDataset.validation(config.data, tokenizer) if config.data.val_files else None
    total_steps = config.trainer.total_training_steps or loader.steps_per_epoch * config.trainer.total_epochs
    engine = SingleEngine.for_actor(config, total_steps)
    store = checkpoint_store(config)
    trainer = SupervisedTrainer(config, engine, loader, validation, store, tokenizer, total_steps)
    checkpoint = resume_point(config.trainer, store)
    state = trainer.restore(checkpoint) if checkpoint else None
    with Tracker(config, total_steps, checkpoint.step if checkpoint else None, state) as tracker:
        return trainer.export() if trainer.fit(tracker) else None


class SupervisedTrainer:
    """One run, until its steps are done or someone stops it."""

    part = "actor"
    """The folder of the model in a checkpoint."""

    def __init__(
        self, config: Config, engine: SingleEngine, loader: Loader, validation: PromptDataset | None,
        store: CheckpointStore, tokenizer: Any, total_steps: int,
    ):  # fmt: skip
        self.config, self.engine, self.loader, self.validation = config, engine, loader, validation
        self.store, self.tokenizer, self.total_steps = store, tokenizer, total_steps
        self.step_no = 0
        self.timer = Timer()
        self.void_updates = 0  # in a row

    def step(self) -> tuple[Metrics, Batch]:
        """One optimizer step on data.train_batch_size rows."""
        batch = self.batch(self.loader.next_prompts())
        with self.timer("update_actor"):
            found = self.engine.train_step(self.engine.micro_batches(batch), likelihood(batch), WANT)
        return {name if "/" in name else f"train/{name}": value for name, value in found.items()}, batch

    def batch(self, rows: list[PromptRow]) -> Batch:
        return answer_batch(rows, self.tokenizer.pad_token_id)

    def validate(self) -> Metrics:
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

    def fit(self, tracker: Tracker) -> bool:
        """All steps that are left; False if it was interrupted, with a checkpoint of where it stands."""
        if self.step_no == 0 and self.validation and self.config.trainer.val_before_train:
            tracker.log(0, self.validate())
        with Interruption() as interruption:
            while self.step_no < self.total_steps and not interruption.asked:
                self.step_no += 1
                self.advance(tracker, last=self.step_no == self.total_steps)
        if self.step_no < self.total_steps:
            self.save(tracker)
            return False
        return True

    def advance(self, tracker: Tracker, last: bool) -> None:
        """One step, and what its number calls for."""
        trainer = self.config.trainer
        self.timer.reset()
        with self.timer("step"):
            metrics, batch = self.step()
            self.stop_if_void(metrics, batch)
            if self.validation and trainer.test_freq > 0 and (last or self.step_no % trainer.test_freq == 0):
                metrics |= self.validate()
            if trainer.save_freq > 0 and (last or self.step_no % trainer.save_freq == 0):
                with self.timer("save_checkpoint"):
                    self.save(tracker)
        responses, tokens = token_counts(batch)
        place = {"training/global_step": float(self.step_no), "training/epoch": float(self.loader.epoch)}
        speed = throughput_metrics(tokens, self.timer.seconds["step"], 1)
        tracker.log(self.step_no, metrics | place | self.timer.metrics(responses, tokens) | speed)

    def stop_if_void(self, metrics: Metrics, batch: Batch) -> None:
        """An update with a NaN or an infinity in it is skipped; several in a row end the run."""
        void = metrics["train/skipped"] > 0
        self.void_updates = self.void_updates + 1 if void else 0
        if void:
            log.warning("step %d: loss or gradient was not finite; that update is skipped", self.step_no)
        if self.void_updates >= self.config.trainer.max_nonfinite_steps:
            raise UserError(
                f"{self.void_updates} updates in a row had a loss or gradient that was not finite; rows of the last: "
                + ", ".join(batch.extras["place"][:8]),
                key="trainer.max_nonfinite_steps",
                value=self.config.trainer.max_nonfinite_steps,
                fix="look at the rows; lower actor_rollout_ref.actor.optim.lr, or use fp32",
            )

    def save(self, tracker: Tracker) -> None:
        """Everything that the rest of the run depends on."""
        with self.store.write(self.step_no) as folder:
            self.engine.save(folder / self.part)
            self.tokenizer.save_pretrained(folder / self.part)
            save_state(folder, {
                "step": self.step_no,
                "loader": self.loader.state_dict(),
                "rng": rng_state(),
                "void_updates": self.void_updates,
                "loggers": tracker.state_dict(),
                "config": flat(self.config),
            })  # fmt: skip

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Back to the state after the checkpoint's step; returns what loggers need to go on."""
        state = load_state(checkpoint.folder)
        check_config(state["config"], self.config)
        self.engine.load(checkpoint.folder / self.part)
        self.loader.load_state_dict(state["loader"])
        restore_rng(state["rng"])
        self.step_no, self.void_updates = state["step"], state["void_updates"]
        log.info("going on after step %d, from %s", self.step_no, checkpoint.folder)
        return state["loggers"]

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
