"""Prompts become scored responses: draw, generate, score, and draw again while too few groups say anything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch

from paddock.algorithms.selection import group_metric, informative_groups
from paddock.config.schema import AlgorithmConfig, RewardModelConfig
from paddock.core.batch import Batch
from paddock.core.timing import Timer
from paddock.data.dataset import PromptRow
from paddock.data.loader import Loader, columns_of, prompt_batch
from paddock.engines.rollout.base import Decoded, EngineConfig, Sampling, Until
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import Score, ScoreRequest
from paddock.rewards.scoring import Scoring
from paddock.rollouts.batch import in_a_row, with_prompts, with_responses
from paddock.rollouts.conversations import OnEpisodes
from paddock.rollouts.environments import Sampler
from paddock.rollouts.episode import Episode, asks_its_own, tokens_of, turns_of
from paddock.rollouts.rounds import Rounds
from paddock.rollouts.texts import Pieces, backend_of, pieces_of, texts_of
from paddock.rollouts.window import DrawnBatch, Window

Metrics = dict[str, float]
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "min": min, "max": max}
"""By the last part of a metric's name: how rounds of equal size become one. `std` needs the means as well; metrics with
other names count answers."""

Generating = Callable[[Timer], AbstractContextManager[None]]
"""Makes a context in which the rollout engine has the policy's weights."""


class CollectorConfig(EngineConfig, Protocol):
    """The sections of a config that a collector reads: those of the engine, and two more."""

    algorithm: AlgorithmConfig
    reward_model: RewardModelConfig


class ModelScoring(Protocol):
    """Adds the scores of a reward model to those that rules gave."""

    def add(
        self, batch: Batch, texts: Sequence[str], metrics: Metrics, everywhere: bool = False
    ) -> tuple[Batch, Metrics]: ...


@dataclass(frozen=True, eq=False)
class Drawn:
    """Holds responses whose scores are not all there yet."""

    batch: Batch
    scoring: Scoring
    left: Mapping[int, Episode]
    """Responses whose scoring has not begun, by their index in the batch."""
    greedy: Drawn | None = None
    """One greedy response per prompt, for ReMax."""


class Collector:
    """Collects the batch of a step: draws prompts, has them answered, and scores the answers."""

    def __init__(
        self,
        config: CollectorConfig,
        loader: Loader,
        engine: Sampler,
        rewards: RewardManager,
        tokenizer: Any,
        stops: frozenset[int],
        models: ModelScoring | None = None,
        greedy: bool = False,
        last_step: int = sys.maxsize,
    ):
        """`greedy`: one greedy response per prompt is drawn and scored too, as ReMax needs. `last_step`: the run's last
        one, behind which nothing is drawn."""
        self.models, self.greedy = models, greedy
        self.config, self.loader, self.engine, self.rewards, self.tokenizer = config, loader, engine, rewards, tokenizer
        self.samples = config.actor_rollout_ref.rollout.n
        self.sampling = training_sampling(config, stops)
        data, filtering, ahead = config.data, config.algorithm.filter_groups, config.algorithm.staleness
        self.rounds: Rounds | None = None
        if filtering.enable:
            prompts, needed = data.gen_batch_size, data.train_batch_size
            self.rounds = Rounds(loader, prompts, self.samples, ahead, last_step, needed, filtering)
        self.window = self.rounds or Window(loader, data.train_batch_size, self.samples, ahead, last_step)

    def collect(self, step: int, time: Timer, generating: Generating) -> tuple[Batch, Metrics]:
        """Returns the batch of a step: data.train_batch_size prompts with their responses and scores.

        Responses are drawn inside of `generating`, and scored after it; only with `filter_groups`, where scores decide
        whether more are drawn, inside.
        """
        self.rewards.steps_done = step - 1
        before = self.engine.decoded or Decoded()
        if self.rounds:
            batch, metrics = self.collect_filtered(self.rounds, step, time, generating)
        else:
            batch, metrics = self.collect_batch(step, time, generating)
        metrics |= self.window.counts() if self.window.staleness else {}
        if self.engine.runs_on:
            metrics |= {"rollout/idle_s": self.engine.idle, "training/idle_s": time.seconds["gen"]}
        return batch, metrics | (self.engine.decoded.since(before) if self.engine.decoded else {})

    def run_on(self, step: int) -> None:
        """Has responses of later steps go on beside the training, if the rollout has a pool of its own."""
        if self.window.staleness:
            self.engine.run_on(self.window.unfinished(), replace(self.sampling, step=step))

    def collect_filtered(self, window: Rounds, step: int, time: Timer, generating: Generating) -> tuple[Batch, Metrics]:
        """Returns a batch of groups whose responses fare differently, of as many rounds as that takes."""
        waited, rounds = len(window.buffer.groups), list[Metrics]()
        with nullcontext() if window.buffer.full and not self.engine.runs_on else generating(time):
            while not window.buffer.full:
                head = window.fill(step)
                batch, metrics = self.score_drawn(self.draw(head.rows, step, time, head), time)
                if window.decide(batch):
                    rounds.append(metrics)
                else:
                    waited = len(window.buffer.groups)
        found = {"training/num_gen_batches": float(len(rounds))}
        if rounds:
            new = len(window.buffer.groups) - waited
            found["training/informative_groups"] = new / (len(rounds) * window.prompts)
        self.run_on(step)
        batch, dropped = window.train(self.engine.version)
        return batch, over_rounds(rounds) | found | dropped

    def collect_batch(self, step: int, time: Timer, generating: Generating) -> tuple[Batch, Metrics]:
        """Returns the batch of a step, of which earlier steps may have drawn a part; draws parts of later ones."""
        batch = self.window.fill(step)
        with nullcontext() if batch.finished and not self.engine.runs_on else generating(time):
            drawn = self.draw(batch.rows, step, time, batch)
        self.run_on(step)
        return self.score_drawn(drawn, time)

    def draw(self, rows: list[PromptRow], step: int, time: Timer, batch: DrawnBatch | None = None) -> Drawn:
        """Draws responses to these prompts, and for ReMax the greedy one of each. `batch`: the window's, if the prompts
        are of one."""
        sampling = replace(self.sampling, step=step)
        with time("gen"):
            drawn = self.go_on(batch, sampling) if batch else self.respond(rows, self.samples, sampling)
        if not self.greedy:
            return drawn
        with time("gen_max"):
            return replace(drawn, greedy=self.respond(rows, 1, replace(sampling, temperature=0.0)))

    def score_drawn(self, drawn: Drawn, time: Timer) -> tuple[Batch, Metrics]:
        """Returns the responses with their scores; for ReMax also with the score of each prompt's greedy response."""
        with time("reward"):
            batch, metrics = self.score(drawn)
            if drawn.greedy is None:
                return batch, metrics
            greedy, _ = self.score(drawn.greedy)
        score = dict(zip(greedy.group.tolist(), greedy.need("scores").sum(-1).tolist(), strict=True))
        return batch.with_(baseline_scores=torch.tensor([score[group] for group in batch.group.tolist()])), metrics

    def respond(self, rows: list[PromptRow], samples: int, sampling: Sampling) -> Drawn:
        """Returns responses; those that ended early are being scored already."""
        return self.drawn_by(lambda on_done, _: self.engine.episodes(rows, samples, sampling, on_done), rows, samples)

    def go_on(self, batch: DrawnBatch, sampling: Sampling) -> Drawn:
        """Returns the responses of the window's first batch; in the slots that they leave, later ones are drawn."""
        window, rounds = self.window, self.rounds
        looks = rounds is not None and self.engine.ends_sooner and self.models is None

        def draw(on_done: OnEpisodes | None, hopeless: Callable[[], int]) -> list[Episode]:
            def lacks() -> bool:
                assert rounds is not None
                rounds.hopeless = hopeless()
                return rounds.lacks

            if on_done and (early := [episode for episode in batch.episodes.values() if episode.finished]):
                on_done(early)
            while not batch.finished:
                asked = window.unfinished()
                head = [episode.id for episode in asked if episode.id in batch.episodes]
                sooner = lacks if looks and on_done else None  # looks at scores that come beside the decode
                until = Until(head, sooner=sooner) if window.staleness or sooner else None
                window.take(self.engine.go_on(asked, sampling, on_done, until))
                if not batch.finished:
                    window.fill(sampling.step)  # another round is certain
            return list(window.pop(self.engine.version).episodes.values())

        return self.drawn_by(draw, batch.rows, self.samples)

    def drawn_by(
        self,
        draw: Callable[[OnEpisodes | None, Callable[[], int]], list[Episode]],
        rows: list[PromptRow],
        samples: int,
    ) -> Drawn:
        """Returns the responses that `draw` returns; has those scored at once of which it tells early. `draw` may ask
        how many groups of these are already known to be uninformative."""
        batch, scoring = prompt_batch(rows, samples, self.tokenizer.pad_token_id), self.rewards.begin()
        indices = {number: index for index, number in enumerate(batch.row.tolist())}

        there: dict[int, Episode] = {}
        informative: dict[int, bool] = {}

        def ended(episodes: list[Episode]) -> None:
            new = {indices[one.id]: one for one in episodes if one.id in indices}
            there.update(new)
            scoring.add(self.requests(new))

        def hopeless() -> int:
            scores = scoring.so_far()
            for first in range(0, len(batch), samples):
                group = range(first, first + samples)
                if first not in informative and all(index in there and index in scores for index in group):
                    responses = self.filled(batch.rows(torch.tensor(group)), [there[index] for index in group])
                    responses, _ = self.finished(responses, [scores[index] for index in group])
                    metric = group_metric(responses, self.config.algorithm.filter_groups.metric)
                    informative[first] = bool(informative_groups(responses, metric).all())
            return list(informative.values()).count(False)

        found = draw(ended if self.config.reward_model.launch_reward_fn_async else None, hopeless)
        left = {index: one for index, one in enumerate(found) if index not in scoring}
        return Drawn(self.filled(batch, found), scoring, left)

    def filled(self, batch: Batch, episodes: Sequence[Episode]) -> Batch:
        """Returns the rows of these prompts with their responses."""
        pad = self.tokenizer.pad_token_id
        if any(map(asks_its_own, episodes)):
            batch = with_prompts(batch, episodes, pad)
        return with_responses(batch, episodes, pad)

    def score(self, drawn: Drawn, validation: bool = False) -> tuple[Batch, Metrics]:
        """The batch with its scores, once all are there: those of rules, an environment's, and a reward model's."""
        batch, scoring = drawn.batch, drawn.scoring
        if drawn.left:
            scoring.add(self.requests(drawn.left))
        batch, metrics = self.finished(batch, scoring.collect())
        if self.models is None:
            return batch, metrics
        return self.models.add(batch, self.decode(batch.answers()), metrics, everywhere=validation)

    def finished(self, batch: Batch, scores: Sequence[Score]) -> tuple[Batch, Metrics]:
        """Returns the batch with the scores of rules and of its environments."""
        batch, metrics = self.rewards.finish(batch, scores)
        if batch.environment_rewards is not None:
            batch = batch.with_(scores=batch.need("scores") + batch.environment_rewards, environment_rewards=None)
        return batch, metrics

    def requests(self, episodes: Mapping[int, Episode]) -> dict[int, ScoreRequest | None]:
        """Returns what scorers are asked of these episodes, by the same indices."""
        tokens = [tokens_of(one) for one in episodes.values()]
        last = {index: turns[-1] for index, one in episodes.items() if len(turns := turns_of(one)) > 1}
        last_texts = dict(zip(last, self.decode(list(last.values())), strict=True))
        rows = zip(episodes.items(), self.decode(tokens), tokens, strict=True)
        return {
            index: self.rewards.request({**columns_of(one.row), **one.extras}, one.id, text, own, last_texts.get(index))
            for (index, one), text, own in rows
        }

    def decode(self, answers: Sequence[list[int]]) -> list[str]:
        """Returns the texts of these tokens, without special ones."""
        if self.pieces is not None:
            lengths = np.array([len(answer) for answer in answers], np.int64)
            return texts_of(self.pieces, in_a_row(answers, np.int64), lengths)
        backend = backend_of(self.tokenizer)
        if backend is None:
            return self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return backend.decode_batch(answers, skip_special_tokens=True)  # all cores, without Python between two texts

    @cached_property
    def pieces(self) -> Pieces | None:
        return pieces_of(self.tokenizer)


def over_rounds(rounds: Sequence[Metrics]) -> Metrics:
    """Returns the metrics of all answers that were scored in these rounds."""
    found: dict[str, list[float]] = {}
    for metrics in rounds:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {
        name: spread(rounds, name) if name.endswith("/std") else STATISTICS.get(name.rpartition("/")[2], sum)(values)
        for name, values in found.items()
    }


def spread(rounds: Sequence[Metrics], name: str) -> float:
    """Returns the standard deviation (population) of all answers, by that of each round and its distance from their
    mean. A round in which no answer has a value has no mean, and does not count."""
    mean = f"{name.removesuffix('std')}mean"
    told = [(metrics[mean], metrics[name]) for metrics in rounds if mean in metrics]
    middle = fmean(value for value, _ in told) if told else 0.0
    return sqrt(fmean([own**2 + (value - middle) ** 2 for value, own in told] or [0.0]))


def training_sampling(config: CollectorConfig, stops: frozenset[int]) -> Sampling:
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        max_tokens=rollout.response_length,
        stop_tokens=stops,
        seed=rollout.seed if rollout.seed is not None else config.trainer.seed,
        step=0,
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        ignore_eos=rollout.ignore_eos,
        stop=tuple(rollout.stop),
        min_tokens=rollout.min_tokens,
    )


def validation_sampling(config: CollectorConfig, stops: frozenset[int]) -> Sampling:
    """Returns the sampling of a validation: the same draws each time, so that curves differ by what was learnt
    alone."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    temperature = val.temperature if val.do_sample else 0.0
    return replace(
        training_sampling(config, stops), temperature=temperature, top_k=val.top_k, top_p=val.top_p, min_p=0.0
    )
