"""How good the policy is: answers to the validation prompts, scored, and what the scores say by data source.

mean@N and std@N are over a prompt's N answers; best@k, worst@k and maj@k (the answer most often given) are what k of
them would give, estimated from 1000 draws with replacement; pass@k, for scores of 0 and 1, is exact. All are averaged
over the prompts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddock.core.timing import Timer
from paddock.data.dataset import PromptDataset
from paddock.data.loader import EXTRAS, validation_batches
from paddock.rollouts.collect import Collector, validation_sampling
from paddock.rollouts.episode import COLUMNS
from paddock.runs.samples import Sample, dump_samples, samples_of
from paddock.trainer.metrics import spread
from paddock.workers.updates import Metrics

DRAWS, SEED = 1000, 42
VOTE = "pred"
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


class Validation:
    """Answers and scores the rows of a dataset, as often as it is asked to."""

    def __init__(self, collector: Collector, dataset: PromptDataset):
        self.collector, self.dataset, self.config = collector, dataset, collector.config
        self.sampling = validation_sampling(self.config, collector.sampling.stop_tokens)

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
            samples += samples_of(batch, self.collector.tokenizer)
        return samples, returned


def validation_metrics(samples: Sequence[Sample], returned: Collection[str]) -> dict[str, float]:
    """Returns ``val-core/{source}/{variable}/...`` for the mean, maj and best of `core_variable` at the largest N,
    ``val-aux/...`` for the rest. Variables are the reward and, of the samples' extras, what the scorer `returned`."""
    found: dict[str, float] = {}
    for source, prompts in by_source(samples).items():
        extras = [sample.extras for prompt in prompts for sample in prompt]
        present = {name for one in extras for name, value in one.items() if value is not None}
        names = ["reward", *(name for name in sorted(returned) if name in present)]
        core = core_variable(prompts) if "acc" in names else "reward"
        for variable in names:
            for metric, value in variable_metrics(prompts, variable).items():
                statistic, _, size = metric.partition("/")[0].partition("@")
                largest = int(size) == max(map(len, prompts))
                is_core = variable == core and statistic in ("mean", "maj", "best") and largest
                section = "val-core" if is_core else "val-aux"
                found[f"{section}/{source}/{variable}/{metric}"] = value
    turns = [float(sample.extras["num_turns"]) for sample in samples if "num_turns" in sample.extras]
    return found | spread("val-aux/num_turns", turns)


def core_variable(prompts: Sequence[Sequence[Sample]]) -> str:
    """Returns `acc` if every answer of a data source has one, else `reward`: a mean over some of them says nothing."""
    every = all(value_of(sample, "acc") is not None for prompt in prompts for sample in prompt)
    return "acc" if every else "reward"


def by_source(samples: Sequence[Sample]) -> dict[str, list[list[Sample]]]:
    """Returns the answers to each prompt of each data source."""
    sources: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        sources[sample.data_source][sample.group].append(sample)
    return {source: list(groups.values()) for source, groups in sources.items()}


def variable_metrics(prompts: Sequence[Sequence[Sample]], variable: str) -> dict[str, float]:
    """Averages over the prompts that have the metric: those with fewer answers have none at a larger k."""
    per_prompt: dict[str, list[float]] = defaultdict(list)
    rows = [[(value_of(s, variable), s.extras.get(VOTE)) for s in prompt] for prompt in prompts]
    rows = [[(value, vote) for value, vote in row if value is not None] for row in rows]
    binary = all(value in (0.0, 1.0) for row in rows for value, _ in row)
    for row in rows:
        votes = [str(vote) for _, vote in row]
        ballots = tuple(map(votes.index, votes)) if any(vote is not None for _, vote in row) else None
        for metric, number in prompt_metrics(tuple(value for value, _ in row), ballots, binary).items():
            per_prompt[metric].append(number)
    return {metric: float(np.mean(numbers)) for metric, numbers in per_prompt.items()}


@lru_cache(maxsize=4096)  # scores of 0 and 1 repeat from prompt to prompt
def prompt_metrics(scores: tuple[float, ...], votes: tuple[int, ...] | None, binary: bool) -> dict[str, float]:
    """Returns the metrics of one prompt's answers; equal numbers in `votes` are equal answers."""
    n = len(scores)
    if n == 0:
        return {}
    values = np.array(scores)
    found = {f"mean@{n}": float(values.mean())}
    if n > 1:
        found[f"std@{n}"] = float(values.std())
    for k in sizes(n):
        drawn = values[draws(n, k)]
        results = {"best": drawn.max(0), "worst": drawn.min(0)}
        if votes is not None:
            results["maj"] = values[majority(votes, *tally(n, k))]
        for name, result in results.items():
            found |= {f"{name}@{k}/mean": float(result.mean()), f"{name}@{k}/std": float(result.std())}
    if binary:
        found |= {f"pass@{k}": pass_at(n, int(sum(scores)), k) for k in (1, *sizes(n))}
    return found


def sizes(n: int) -> list[int]:
    """Returns 2, 4, 8, ..., and n itself."""
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + ([n] if n > 1 else [])


@cache
def draws(n: int, k: int) -> Indices:
    """Returns indices ``[k, DRAWS]`` with replacement, by numpy's legacy generator: figures compare with older logs."""
    return np.ascontiguousarray(np.random.RandomState(SEED).randint(0, n, (DRAWS, k)).T)


@cache
def tally(n: int, k: int) -> tuple[Floats, Floats]:
    """Returns how often each draw holds each answer, and its first index there (k: nowhere), both [n, DRAWS]."""
    times, first, draw = np.zeros((n, DRAWS), np.float32), np.full((n, DRAWS), k, np.float32), np.arange(DRAWS)
    for index in reversed(range(k)):
        times[draws(n, k)[index], draw] += 1
        first[draws(n, k)[index], draw] = index
    return times, first


def majority(votes: Sequence[int], times: Floats, first: Floats) -> Indices:
    """Returns for each draw the first answer that gives the most frequent vote; of equally frequent ones the first
    drawn."""
    support = np.equal.outer(votes, votes).astype(np.float32) @ times
    return np.argmax(support - first / (len(votes) + 1), axis=0)


def pass_at(n: int, correct: int, k: int) -> float:
    """``1 - C(n - c, k) / C(n, k)``: the chance that k of the n answers, drawn without replacement, hold a right one.
    arXiv:2107.03374"""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def value_of(sample: Sample, variable: str) -> float | None:
    value: Any = sample.score if variable == "reward" else sample.extras.get(variable)
    return float(value) if isinstance(value, int | float | np.number | np.bool_) else None
