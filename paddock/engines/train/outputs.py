"""What a forward pass of a training engine is asked for, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paddock.core.batch import PerToken
from paddock.models.experts import Routing

Want = frozenset[str]  # names of columns of `Outputs`
EXPERT_COLUMNS = frozenset({"prompt_experts", "response_experts"})
TOPK_COLUMNS = frozenset({"topk_tokens", "topk_log_probs"})
CHOICE_COLUMNS = frozenset({"choice_log_probs", "kth_log_probs"})


@dataclass(frozen=True, eq=False)
class Outputs:
    """Columns that a forward computes for every response token of its batch, in the batch's shape; None if unwanted."""

    log_probs: PerToken | None = None
    entropy: PerToken | None = None
    sum_pi_squared: PerToken | None = None
    values: PerToken | None = None
    topk_tokens: Tensor | None = None
    """``[B, R, k]``: the likeliest tokens at each position, k by `Settings.topk`."""
    topk_log_probs: Tensor | None = None
    choice_log_probs: Tensor | None = None
    """``[B, R, k]``: log-probs of the tokens in the batch's `teacher_tokens`."""
    kth_log_probs: PerToken | None = None
    """Log-prob of the k-th likeliest token, without gradient."""
    prompt_experts: Tensor | None = None
    response_experts: Tensor | None = None
    routing: Routing | None = None
    """Choices of experts in this forward; not a column."""

    def need(self, name: str) -> Tensor:
        """Returns a column that the forward was asked for."""
        column = getattr(self, name)
        assert column is not None, f"the forward was not asked for {name}"
        return column
