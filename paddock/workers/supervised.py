"""Roles that learn from given answers: a policy from prompt/answer rows, a reward model from preference pairs."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from paddock.core.balance import token_budget_micro_batches
from paddock.core.batch import Batch, PerRow
from paddock.core.masked import Denominators, aggregate
from paddock.core.processes import is_first
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget
from paddock.errors import UserError
from paddock.models.packing import sequence_lengths
from paddock.models.reward_head import RewardModel, save_classifier, sequence_scores
from paddock.workers.role import MiniBatch, TrainedRole


class Learner(TrainedRole):
    """A model that learns from rows whose answers are given: one optimizer step per batch."""

    def __init__(self, engine: Engine):
        super().__init__(engine, "learner", prefix="train")

    def export(self, folder: Path) -> None:
        """Writes the model as `transformers` loads it, in the type it computes in; every rank must call it."""
        self.engine.export(folder)

    def unread(self) -> int | None:
        """Returns the token that `transformers` takes for padding at the end of a scored sequence, if any."""
        return None


class AnswerLearner(Learner):
    """Supervised fine-tuning: the policy learns the answers of prompt/answer rows."""

    wants = frozenset({"log_probs"})

    def loss(self, mini: MiniBatch, micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        return likelihood(micro, outputs, mini.denominators)


class PairLearner(Learner):
    """A reward model that learns from preference pairs: rows 2i and 2i + 1 are one pair, the preferred answer first."""

    wants = frozenset({"values"})
    rows_together = 2

    def loss(self, mini: MiniBatch, micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        return preference(micro, outputs, int(mini.denominators.sequences) // 2)

    def micro_batches(self, mini: Batch) -> list[Batch]:
        return self.engine.micro_batches(mini, whole_pairs(mini, self.engine.settings.budget))

    @property
    def model(self) -> RewardModel:
        assert isinstance(self.engine.model, RewardModel)
        return self.engine.model

    def export(self, folder: Path) -> None:
        with self.on_device():
            weights = dict(self.engine.weights())
            if is_first():
                save_classifier(self.model, folder, weights)

    def unread(self) -> int | None:
        return self.model.unread


def likelihood(micro: Batch, outputs: Outputs, denominators: Denominators) -> tuple[Tensor, dict[str, Tensor]]:
    """``-1/T sum_t log p(y_t | x, y_<t)`` over the T answer tokens of the whole batch: micro-batches add up to it."""
    share = aggregate(-outputs.need("log_probs"), micro.need("mask"), "token-mean", denominators)
    return share, {"train/loss": share.detach()}


def preference(micro: Batch, outputs: Outputs, pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """``-1/N sum log sigmoid(r(x, y_preferred) - r(x, y_other))`` over the N pairs of the whole batch.

    Bradley and Terry, 1952
    """
    margins = margin(sequence_scores(micro, outputs.need("values")))
    share = -logsigmoid(margins).sum() / pairs
    found = margins.detach()
    return share, {
        "train/loss": share.detach(),
        "train/accuracy": (found > 0).double().sum() / pairs,
        "train/margin": found.double().sum() / pairs,
    }


def margin(scores: PerRow) -> PerRow:
    """Returns r(preferred) - r(other) of each pair."""
    return scores[::2] - scores[1::2]


def whole_pairs(batch: Batch, budget: Budget) -> list[Tensor]:
    """Returns row positions of micro-batches within the budget; a pair's two rows stay together."""
    if len(batch) == 0:
        return []
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
