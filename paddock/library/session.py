"""A run that is open, and what a program does with it between steps: evaluate, generate, sample, score, learn."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch

from paddock.commands.generation import rows_of_prompts, texts_for_people
from paddock.config.schema import Config
from paddock.core.batch import GIVEN, Batch
from paddock.core.device import device_of, empty_cache
from paddock.core.timing import Timer
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.loader import prompt_batch
from paddock.errors import UserError
from paddock.library.rows import files_of_rows
from paddock.rollouts.batch import with_prompts, with_responses
from paddock.rollouts.collect import Drawn
from paddock.rollouts.episode import Episode, Span, tokens_of
from paddock.runs.checkpoint import Checkpoint
from paddock.trainer.interruption import Interruption
from paddock.trainer.lifecycle import Listeners, Metrics
from paddock.trainer.loop import Trainer
from paddock.trainer.model_rewards import validation_styles
from paddock.trainer.run import RunKind, Training
from paddock.trainer.validation import Validation

log = logging.getLogger(__name__)

DRAWN = "drawn"
"""Name under which an episode's extras have the spans that the run's own weights and environment wrote."""


class Session:
    """The run's trainer, roles and processes, from the first use to `close`."""

    def __init__(self, config: Config, kind: RunKind, origins: Mapping[str, str], listeners: Listeners):
        self.config, self.kind = config, kind
        self.training = Training(config, kind, origins, listeners)
        self.training.__enter__()
        self.asked = itertools.count(1 << 31)
        """Ids of prompts that are none of the training data's."""
        self.drawn: dict[int, int] = {}
        """The step after which `sample` drew with each version of the weights."""

    @contextmanager
    def trainer(self) -> Iterator[Trainer]:
        """Gives the block the trainer, with the random numbers of the run."""
        with self.training.own_state():
            found = self.training.opened()
            if not isinstance(found, Trainer):
                raise UserError(
                    "this algorithm draws no responses", key="algorithm", value=self.kind.command,
                    fix="train a policy: grpo, ppo, rloo, ...",
                )  # fmt: skip
            yield found

    def evaluate(self, files: list[str] | None) -> Metrics:
        with self.trainer() as trainer:
            validation = trainer.validation
            if files is not None:
                dataset = PromptDataset(
                    files, trainer.collector.tokenizer, trainer.config.data, key="data.val_files",
                    reader=trainer.loader.dataset.prompts.reader,
                    styles=validation_styles(self.config.reward_model),
                )  # fmt: skip
                validation = Validation(trainer.collector, dataset, trainer.roles.stop_tokens)
            if validation is None:
                fix = "evaluate(rows), or Run(..., validation=rows)"
                raise UserError("there are no rows to evaluate on", key="data.val_files", fix=fix)
            with trainer.roles.rollout.awake(Timer()):
                return validation.run(trainer.step_no, Timer())[0]

    def generate(
        self, prompts: Sequence[Any], n: int, temperature: float | None, response_length: int | None
    ) -> list[list[str]]:
        require_count("n", n)
        if response_length is not None:
            require_count("response_length", response_length)
        if temperature is not None and not (isinstance(temperature, Real) and 0 <= temperature < math.inf):
            raise UserError(
                "is no temperature", key="temperature", value=f"{temperature!r:.80}", fix="0 (greedy), or more"
            )
        with self.trainer() as trainer:
            collector = trainer.collector
            longer = "Run(..., prompt_length={})"
            rows = rows_of_prompts(trainer.config.data, collector.tokenizer, prompts, self.asked, longer)
            sampling = replace(collector.sampling, step=trainer.step_no)
            if temperature is not None:
                sampling = replace(sampling, temperature=temperature)
            if response_length is not None:
                sampling = replace(sampling, max_tokens=response_length)
            with trainer.roles.rollout.awake(Timer()):
                found = trainer.roles.rollout.episodes(rows, n, sampling)
            texts = iter(texts_for_people(found, collector.decode))
            return [list(itertools.islice(texts, n)) for _ in rows]

    def sample(self, rows: Any, n: int | None) -> list[Episode]:
        if n is not None:
            require_count("n", n)
        with self.trainer() as trainer:
            collector = trainer.collector
            samples = n or collector.samples
            prompts = self.rows_of(rows, trainer)
            sampling = replace(collector.sampling, step=trainer.step_no + 1)
            with trainer.roles.generating(trainer.timer), trainer.timer("gen"):
                found = trainer.roles.rollout.episodes(prompts, samples, sampling)
            self.drawn |= {span.version: trainer.step_no for one in found for span in one.response}
            texts = collector.decode([tokens_of(one) for one in found])
            return [
                replace(one, text=text, extras={**one.extras, DRAWN: one.spans})
                for one, text in zip(found, texts, strict=True)
            ]

    def rows_of(self, rows: Any, trainer: Trainer) -> list[PromptRow]:
        """Returns the next rows of the training data, or these, under ids that no other row has."""
        if rows is None:
            return trainer.loader.next_prompts(self.config.data.train_batch_size)
        if isinstance(rows, Sequence) and not isinstance(rows, str) and all(isinstance(row, str) for row in rows):
            rows = rows if all(os.path.exists(row) for row in rows) else [{"prompt": row} for row in rows]
        dataset = PromptDataset(
            files_of_rows(rows, "rows"), trainer.collector.tokenizer, trainer.config.data, key="rows",
            reader=trainer.loader.dataset.prompts.reader,
        )  # fmt: skip
        return [replace(row, group=next(self.asked)) for row in dataset.rows(range(len(dataset)))]

    def score(self, found: Sequence[Episode]) -> Batch:
        if not found:
            raise UserError("there is no episode to score", key="run.score", fix="run.sample gives some")
        with self.trainer() as trainer:
            pad = trainer.collector.tokenizer.pad_token_id
            own = [without_origin(one) for one in found]
            batch = prompt_batch([one.row for one in own], 1, pad).with_(row=torch.tensor([one.id for one in own]))
            batch = with_responses(with_prompts(batch, own, pad), own, pad)
            with trainer.timer("reward"):
                rewards = trainer.collector.rewards
                rewards.steps_done = trainer.step_no
                return trainer.collector.score(Drawn(batch, rewards.begin(), dict(enumerate(own))))[0]

    def advantages(self, batch: Batch) -> Batch:
        with self.trainer() as trainer:
            return trainer.with_advantages(batch)[0]

    def learn(self, batch: Batch) -> Metrics:
        with self.trainer() as trainer, Interruption() as interruption, trainer.keeping(self.training.tracker):
            tracker = self.training.tracker
            batch = self.complete(batch, trainer)
            current = self.drawn_by_current_weights(batch, trainer)
            trainer.step_no += 1
            with trainer.timer("step"):
                metrics = trainer.learn(batch, current) | trainer.describe(batch)
                trainer.settle(metrics, batch, tracker)
            step = trainer.record(metrics, batch, tracker)
            if interruption.asked:
                trainer.save(tracker)
        if interruption.asked:
            raise KeyboardInterrupt
        return step.metrics

    def complete(self, batch: Batch, trainer: Trainer) -> Batch:
        """Fills what an update and its metrics read, for a batch with advantages of the caller's own."""
        if batch.advantages is None:
            fix = "learn(run.advantages(batch)), or batch.with_(advantages=...) with a number per token"
            raise UserError("the batch has no advantages", key="batch", fix=fix)
        if batch.rewards is None:
            batch = batch.with_(rewards=batch.scores)
        if batch.returns is None and trainer.roles.critic is None:
            batch = batch.with_(returns=batch.advantages)
        return trainer.with_old_log_probs(batch) if batch.old_log_probs is None else batch

    def drawn_by_current_weights(self, batch: Batch, trainer: Trainer) -> bool:
        """False for rows that `sample` drew before the last step, or did not draw: their ratios are not 1."""
        if batch.versions is None:
            return False
        versions = batch.versions[batch.need("mask") != 0].unique().tolist()
        return all(self.drawn.get(version) == trainer.step_no for version in versions)

    def sync(self) -> None:
        with self.trainer() as trainer:
            trainer.roles.rollout.publish()

    def save(self) -> Checkpoint:
        with self.training.own_state():
            run = self.training.opened()
            run.save(self.training.tracker)
            assert run.saved is not None
            return run.saved

    def keep(self) -> None:
        """Saves the last step of a run that is closed between two steps: the next call goes on behind it."""
        run = self.training.run
        if run is None or not run.intact or not self.config.trainer.save_last:
            return
        if run.finished["step"] == (run.saved.step if run.saved else 0):
            return
        try:
            self.save()
        except Exception as error:  # whatever ended the block in which the run was open is what people shall read
            log.error("the steps since the last checkpoint could not be saved: %s", error)

    def close(self) -> None:
        self.keep()
        self.training.__exit__(None, None, None)
        device = device_of(self.config.trainer.device)
        gc.collect()
        empty_cache(device)


def require_count(name: str, value: Any) -> None:
    """Raises a UserError unless the value counts responses or tokens, before an engine makes room for so many."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise UserError("is not a whole number above 0", key=name, value=f"{value!r:.80}", fix=f"{name}=1 or more")


def without_origin(episode: Episode) -> Episode:
    """Returns the episode without the extras of `sample`. Spans with log-probs that it did not draw are `GIVEN`."""
    drawn = episode.extras.get(DRAWN, ())

    def marked(span: Span) -> Span:
        own = any(span.tokens == one.tokens and span.log_probs == one.log_probs for one in drawn)
        return span if own or span.log_probs is None else replace(span, version=GIVEN)

    extras = {name: value for name, value in episode.extras.items() if name != DRAWN}
    return replace(episode, spans=[marked(span) for span in episode.spans], extras=extras)
