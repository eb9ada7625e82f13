"""What a forward pass of a training engine is asked for, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paddock.core.batch import PerToken
from paddock.models.experts import Routing

Want = frozenset[str]  # any of: log_probs, entropy, sum_pi_squared, values, and the columns of experts
EXPERT_COLUMNS = frozenset({"prompt_experts", "response_experts"})


@dataclass(frozen=True, eq=False)
class Outputs:
    """Columns that a forward computes for every response token of its batch, in the batch's shape; None if unwanted."""

    log_probs: PerToken | None = None
    entropy: PerToken | None = None
    sum_pi_squared: PerToken | None = None
    values: PerToken | None = None
    prompt_experts: Tensor | None = None
    response_experts: Tensor | None = None
    routing: Routing | None = None
    """Choices of experts in this forward; not a column."""
