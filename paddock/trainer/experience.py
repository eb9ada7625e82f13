"""Prompts become scored responses: draw, generate, score, and draw again while too few groups say anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paddock.algorithms.selection import GroupBuffer, group_metric
from paddock.config.recipes import recipe_of
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.timing import Timer
from paddock.data.dataset import PromptRow
from paddock.data.loader import Loader, prompt_batch
from paddock.engines.rollout.base import Completion, Prompt, RolloutEngine, Sampling
from paddock.rewards.manager import RewardManager

Metrics = dict[str, float]


class Experience:
    """What the policy tried in a step, and what it was worth."""

    def __init__(
        self,
        config: Config,
        loader: Loader,
        engine: RolloutEngine,
        rewards: RewardManager,
        tokenizer: Any,
        stops: frozenset[int],
    ):
        self.config, self.loader, self.engine, self.rewards, self.tokenizer = config, loader, engine, rewards, tokenizer
        self.samples = config.actor_rollout_ref.rollout.n
        self.sampling = training_sampling(config, stops)
        recipe = recipe_of(config.algorithm.adv_estimator)
        self.needs_greedy_baseline = recipe is not None and "greedy_baseline" in recipe.needs

    def collect(self, step: int, time: Timer) -> tuple[Batch, Metrics]:
        """The batch of a step: data.train_batch_size prompts with their responses and scores."""
        data, filter_groups = self.config.data, self.config.algorithm.filter_groups
        if not filter_groups.enable:
            return self.explore(self.loader.next_prompts(data.train_batch_size), step, time)
        buffer = GroupBuffer(data.train_batch_size, filter_groups.max_num_gen_batches)
        metrics: Metrics = {}
        drawn = 0
        while not buffer.full:
            batch, metrics = self.explore(self.loader.next_prompts(data.gen_batch_size), step, time)
            drawn += data.gen_batch_size
            buffer.add(batch, group_metric(batch, filter_groups.metric))
        found = {
            "training/num_gen_batches": float(buffer.rounds),
            "training/informative_groups": len(buffer.groups) / drawn,
        }
        return buffer.take(), metrics | found

    def explore(self, rows: list[PromptRow], step: int, time: Timer) -> tuple[Batch, Metrics]:
        """One round: responses to these prompts, and their scores."""
        with time("gen"):
            batch = self.respond(rows, self.samples, replace(self.sampling, step=step))
        with time("reward"):
            batch, metrics = self.rewards.fill(batch, self.texts(batch))
        if self.needs_greedy_baseline:
            batch = self.with_greedy_baseline(batch, rows, step, time)
        return batch, metrics

    def respond(self, rows: list[PromptRow], samples: int, sampling: Sampling) -> Batch:
        batch = prompt_batch(rows, samples, self.tokenizer.pad_token_id)
        ids = batch.row.view(len(rows), samples).tolist()
        prompts = [Prompt(row.tokens, numbers) for row, numbers in zip(rows, ids, strict=True)]
        return with_responses(batch, self.engine.generate(prompts, sampling), self.tokenizer.pad_token_id)

    def texts(self, batch: Batch) -> list[str]:
        lengths = batch.need("lengths").tolist()
        answers = [row[:length] for row, length in zip(batch.need("responses").tolist(), lengths, strict=True)]
        return self.tokenizer.batch_decode(answers, skip_special_tokens=True)

    def with_greedy_baseline(self, batch: Batch, rows: list[PromptRow], step: int, time: Timer) -> Batch:
        """ReMax: the score of the greedy answer to each prompt."""
        with time("gen_max"):
            greedy = self.respond(rows, 1, replace(self.sampling, step=step, temperature=0.0))
            greedy, _ = self.rewards.fill(greedy, self.texts(greedy))
        score = dict(zip(greedy.group.tolist(), greedy.need("scores").sum(-1).tolist(), strict=True))
        return batch.with_(baseline_scores=torch.tensor([score[group] for group in batch.group.tolist()]))


def with_responses(batch: Batch, completions: list[Completion], pad: int) -> Batch:
    """Completions stand in the order of the batch's rows; the response is as wide as the longest of them."""
    if [completion.row for completion in completions] != batch.row.tolist():
        raise ValueError("the rollout engine returned other rows than were asked for, or in another order")
    lengths = torch.tensor([len(completion.tokens) for completion in completions])
    width = int(lengths.max())
    responses = torch.full((len(completions), width), pad, dtype=torch.long)
    log_probs = torch.zeros(len(completions), width)
    for place, completion in enumerate(completions):
        responses[place, : len(completion.tokens)] = torch.tensor(completion.tokens, dtype=torch.long)
        log_probs[place, : len(completion.tokens)] = torch.tensor(completion.log_probs)
    mask = (torch.arange(width) < lengths[:, None]).long()
    return batch.with_(responses=responses, mask=mask, lengths=lengths, rollout_log_probs=log_probs)


def training_sampling(config: Config, stops: frozenset[int]) -> Sampling:
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
    )


def validation_sampling(config: Config, stops: frozenset[int]) -> Sampling:
    """The same draws at every validation, so that curves differ by what was learnt alone."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    temperature = val.temperature if val.do_sample else 0.0
    return replace(
        training_sampling(config, stops), temperature=temperature, top_k=val.top_k, top_p=val.top_p, min_p=0.0
    )
