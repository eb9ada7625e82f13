"""Scores of rules and scores of a model, put together: ``rule_weight * rule + model_weight * model``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch

from paddock.config.schema import RewardModelConfig
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.data.dataset import BOTH, MODEL, RULE, PromptDataset, Styles, without_a_model
from paddock.errors import UserError
from paddock.rewards.manager import on_last_token
from paddock.workers.reward_model import ModelScorer
from paddock.workers.updates import Metrics

log = logging.getLogger(__name__)


def training_styles(config: RewardModelConfig) -> Styles:
    """Returns how rows of a style are scored in training, if not as the file says.

    Without weights a row's own style decides. Where no row names the model, it was enabled to score them all.
    """

    def styles(named: Collection[str]) -> dict[str, str]:
        if config.model_weight is not None:
            return {RULE: BOTH if config.rule_weight else MODEL}
        if MODEL in named:
            return {}
        log.info("no training row has reward_model.style=model: the reward model scores all of them, and no rule does")
        return {RULE: MODEL}

    return styles if config.enable else without_a_model


def validation_styles(config: RewardModelConfig) -> Styles:
    """Returns how validation rows are scored: as their file says; without a model, by a rule or the user's function."""
    return (lambda _: {}) if config.enable else without_a_model


class ModelRewards:
    """Adds the scores of a reward model to those that rules gave."""

    def __init__(self, scorer: ModelScorer, config: RewardModelConfig):
        self.scorer, self.config = scorer, config

    def check(self, dataset: PromptDataset) -> None:
        """Asks one question before training, with the first prompt."""
        if dataset.shows_images and self.scorer.cheap:
            raise UserError(
                f"it reads texts, and prompts of {dataset.key} show images",
                key="reward_model.enable",
                value=True,
                fix="score by a rule, a function of your own or a judge, which reads texts beside the truth",
            )
        row = dataset[0]
        self.scorer.check(row.messages, row.ground_truth)

    def add(
        self, batch: Batch, texts: Sequence[str], metrics: Metrics, everywhere: bool = False
    ) -> tuple[Batch, Metrics]:
        """Adds the model's part to the batch and the metrics that rules filled. `everywhere`: a model whose opinion is
        cheap gives it on rows, too, that a rule scores, and it is kept beside."""
        styles = batch.extras["style"]
        all_of_them = everywhere and self.scorer.cheap
        wanted = torch.tensor([all_of_them or style != RULE for style in styles])
        opinion, model, model_metrics = self.scores(batch, texts, wanted)
        rule = torch.tensor(batch.extras["score"], dtype=torch.float32)
        of_rule, of_model = (torch.tensor(weights) for weights in zip(*map(self.weights, styles), strict=True))
        mask = batch.need("mask")
        scores = (
            batch.need("scores")
            + on_last_token((of_rule - 1) * rule, mask)  # what else the manager put there, a penalty, stays whole
            + of_model[:, None].to(mask.device) * model.to(mask.device)
        )
        by_rule = torch.tensor([style != MODEL for style in styles])
        extras = {
            **batch.extras,
            "score": scores.sum(-1).tolist(),
            "model_score": where(wanted, opinion),
            "rule_score": where(by_rule, rule),
        }
        if by_rule.any():
            model_metrics["reward/rule/mean"] = float(rule[by_rule].mean())
        model_metrics["reward/score/mean"] = float(scores.sum(-1).mean())
        return batch.with_(scores=scores, extras=extras), metrics | model_metrics

    def scores(self, batch: Batch, texts: Sequence[str], wanted: torch.Tensor) -> tuple[PerRow, PerToken, Metrics]:
        """Scores the wanted rows: one number each, the same by token, and metrics; zeros elsewhere."""
        rows = torch.zeros(len(batch))
        tokens = torch.zeros(batch.need("mask").shape)
        indices = wanted.nonzero().squeeze(-1)
        if not len(indices):
            return rows, tokens, {}
        part = batch if bool(wanted.all()) else batch.rows(indices)
        scored = self.scorer.scores(part, [texts[index] for index in indices.tolist()])
        rows[indices] = scored.rows
        by_token = scored.tokens if scored.tokens is not None else on_last_token(scored.rows, part.need("mask"))
        tokens[indices] = by_token.cpu().float()
        return rows, tokens, scored.metrics | summary(scored.rows)

    def weights(self, style: str) -> tuple[float, float]:
        """Returns the weights of rule and model. Only training mixes them: a validation row is scored as its file
        says."""
        model = 1.0 if self.config.model_weight is None else self.config.model_weight
        return {RULE: (1.0, 0.0), MODEL: (0.0, model), BOTH: (self.config.rule_weight or 0.0, model)}[style]


def where(used: torch.Tensor, values: PerRow) -> list[float | None]:
    return [value if own else None for value, own in zip(values.tolist(), used.tolist(), strict=True)]


def summary(rows: PerRow) -> Metrics:
    numbers = {"mean": rows.mean(), "std": rows.std(correction=0), "min": rows.min(), "max": rows.max()}
    return {f"reward/model/{name}": float(value) for name, value in numbers.items()}
