"""How good the policy is: answers to the validation prompts, scored, by data source."""

from __future__ import annotations

from paddock.core.timing import Timer
from paddock.data.dataset import PromptDataset
from paddock.data.loader import EXTRAS, validation_batches
from paddock.rollouts.collect import Collector, validation_sampling
from paddock.rollouts.counts import COLUMNS
from paddock.runs.samples import Sample, dump_samples, samples_of
from paddock.trainer.validation_metrics import validation_metrics
from paddock.workers.updates import Metrics


class Validation:
    def __init__(self, collector: Collector, dataset: PromptDataset, stops: frozenset[int]):
        self.collector, self.dataset = collector, dataset
        self.config = collector.config
        self.sampling = validation_sampling(self.config, stops)

    def run(self, step: int, time: Timer) -> tuple[Metrics, list[Sample]]:
        self.collector.rewards.steps_done = step
        with time("testing"):
            samples, returned = self.answer()
        folder = self.config.trainer.validation_data_dir
        if folder:
            dump_samples(folder, step, samples, "trainer.validation_data_dir")
        return validation_metrics(samples, returned), samples

    def answer(self) -> tuple[list[Sample], set[str]]:
        """Answers every validation prompt val_kwargs.n times; also returns the names that scorers gave beside the
        score."""
        data, n = self.config.data, self.config.actor_rollout_ref.rollout.val_kwargs.n
        samples: list[Sample] = []
        returned: set[str] = set()
        seed = data.seed or 0
        for rows in validation_batches(self.dataset, data.val_batch_size, shuffle=data.validation_shuffle, seed=seed):
            batch, _ = self.collector.score(self.collector.respond(rows, n, self.sampling), validation=True)
            returned |= set(batch.extras) - {*EXTRAS, *COLUMNS, "score"}
            samples += samples_of(
                batch, lambda tokens: self.collector.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            )
        return samples, returned
