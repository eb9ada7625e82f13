"""The one container of a training step: named columns, one row for each sampled response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from paddock.core.device import to_device
from paddock.errors import UserError

PerRow = Tensor  # [B]     one value per sampled response
PerToken = Tensor  # [B, R]  one value per response token, zero outside `mask`
PerPrompt = Tensor  # [B, P]  one value per prompt token

NOBODY = -1
"""Version of tokens that no weights drew: those of tools and environments, and padding."""

GIVEN = -2
"""Version of tokens that a program gave, with log-probs of the policy that wrote them: the run's weights drew none."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Holds the rows of a training step as named columns of tensors, one row for each sampled response.

    Columns are ``None`` until the phase that fills them has run. Rows carry ids, so joins never rely on order. A
    `PerRow` tensor has the shape ``[B]``, `PerPrompt` ``[B, P]`` and `PerToken` ``[B, R]``, for B rows, P prompt tokens
    and R response tokens.

    >>> import paddock, torch
    >>> batch = paddock.Batch(row=torch.tensor([0, 1]), group=torch.tensor([7, 7]), prompts=torch.ones(2, 4))
    >>> batch = batch.with_(mask=torch.tensor([[1, 1, 0], [1, 1, 1]]), scores=torch.tensor([[0, 1, 0], [0, 0, 0]]))
    >>> len(batch), batch.need("scores").sum(-1).tolist()
    (2, [1, 0])
    """

    row: PerRow
    """Id of the response, unique in the batch."""
    group: PerRow
    """Id of the prompt: rows of equal group answer the same one."""
    prompts: PerPrompt
    """Token ids, left-padded."""
    prompt_mask: PerPrompt | None = None
    """1 on the prompt's own tokens, 0 on padding."""
    responses: PerToken | None = None
    """Token ids, right-padded; R is the longest response present."""
    mask: PerToken | None = None
    """1 on tokens the policy wrote, 0 on padding and on what tools or environments wrote."""
    lengths: PerRow | None = None
    """Tokens of the response, those of tools and environments included; the rest of the row is padding."""
    versions: PerToken | None = None
    """Version of the weights that drew each token; `NOBODY` on padding and on what tools or environments wrote, `GIVEN`
    on what a program put in with log-probs of its own."""
    done: PerRow | None = None
    """True if the response ended by itself, False if it was cut at a limit."""
    environment_rewards: PerToken | None = None
    """What an environment paid, on the last token of each span that it paid for; until scoring adds it to `scores`."""
    rollout_log_probs: PerToken | None = None
    """Log-probs of the responses, by the engine that sampled."""
    old_log_probs: PerToken | None = None
    """Log-probs of the responses, by the actor before this step's updates."""
    ref_log_probs: PerToken | None = None
    teacher_log_probs: PerToken | None = None
    """Log-probs of the responses, by the teacher of each row."""
    teacher_tokens: Tensor | None = None
    """``[B, R, k]``: the teacher's likeliest tokens at each position."""
    teacher_topk_log_probs: Tensor | None = None
    """``[B, R, k]``: their log-probs by the teacher."""
    values: PerToken | None = None
    scores: PerToken | None = None
    """Scores of the reward function, on the last token the policy wrote, and what an environment paid."""
    rewards: PerToken | None = None
    """Scores, less the KL penalty if there is one."""
    weights: PerToken | None = None
    """Importance weights of the actor over the engine that sampled."""
    advantages: PerToken | None = None
    returns: PerToken | None = None
    sum_pi_squared: PerToken | None = None
    """Sum of the squared probabilities of all tokens of the vocabulary."""
    prompt_experts: Tensor | None = None
    """``[B, P, layers, k]``: the experts that each prompt token went to, in each layer that has some."""
    response_experts: Tensor | None = None
    """``[B, R, layers, k]``: those of each response token but the last, which no forward reads."""
    baseline_scores: PerRow | None = None
    """Score of one greedy response to the row's prompt."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Anything else, one entry a row: ground_truth, data_source, images, reward components."""

    def __post_init__(self) -> None:
        rows, widths = len(self.row), {}
        for name, column in self.columns().items():
            if len(column) != rows:
                raise ValueError(f"column {name!r} has {len(column)} rows, the batch {rows}")
            if name in PER_TOKEN:
                widths[name] = column.shape[1]
        for name, values in self.extras.items():
            if len(values) != rows:
                raise ValueError(f"extra {name!r} has {len(values)} rows, the batch {rows}")
        if len(set(widths.values())) > 1:
            raise ValueError(f"per-token columns differ in length: {widths}")

    def __len__(self) -> int:
        return len(self.row)

    def columns(self) -> dict[str, Tensor]:
        """Returns the columns filled so far; ``Batch(**columns, extras=extras)`` restores the batch.

        >>> sorted(batch.columns())
        ['group', 'mask', 'prompts', 'row', 'scores']
        """
        return {name: column for name in COLUMNS if (column := getattr(self, name)) is not None}

    def need(self, column: str) -> Tensor:
        """Returns a column; raises a ValueError if the phase that fills it has not run.

        >>> batch.need("mask").sum().item()
        5
        """
        value = getattr(self, column)
        if value is None:
            raise ValueError(f"batch has no {column!r}: the phase that fills it has not run")
        return value

    def numbers(self, extra: str) -> PerRow:
        """Returns an extra as numbers. None, which a scorer gives for a row that it does not apply to, counts as 0."""
        return torch.tensor([0.0 if value is None else float(value) for value in self.extras[extra]])

    def answers(self) -> list[list[int]]:
        """Returns the token ids of each response, without padding."""
        lengths = self.need("lengths").tolist()
        return [row[:length] for row, length in zip(self.need("responses").tolist(), lengths, strict=True)]

    def turns(self) -> list[list[list[int]]]:
        """Returns the token ids of each turn of the policy, row by row. What an environment writes ends a turn."""
        answers = self.answers()
        found = [[answer] if answer else [] for answer in answers]
        for row in (self.policy_lengths() != self.need("lengths")).nonzero()[:, 0].tolist():
            drawn = zip(answers[row], (self.need("versions")[row] != NOBODY).tolist(), strict=False)
            parts = groupby(drawn, key=itemgetter(1))
            found[row] = [[token for token, _ in part] for own, part in parts if own]
        return found

    def turn_counts(self) -> PerRow:
        """Returns the number of turns of the policy in each row; without `versions` nobody else wrote."""
        if self.versions is None:
            return torch.ones_like(self.row)
        own = self.versions != NOBODY
        return (own[:, 1:] & ~own[:, :-1]).sum(-1) + own[:, :1].sum(-1)

    def policy_lengths(self) -> PerRow:
        """Returns the number of tokens that the policy wrote in each row, also of those that a correction rejected."""
        return self.need("lengths") if self.versions is None else (self.versions != NOBODY).sum(-1)

    def with_(self, **columns: Any) -> Batch:
        """Returns a batch with these columns filled or replaced; the others are shared, not copied.

        >>> batch.with_(advantages=torch.ones(2, 3)).need("advantages").mean().item()
        1.0
        """
        unknown = sorted(set(columns) - {*COLUMNS, "extras"})
        if unknown:
            raise ValueError(f"a batch has no columns {unknown}: it has {[*COLUMNS, 'extras']}")
        return replace(self, **columns)

    def rows(self, index: Tensor | slice) -> Batch:
        """Returns the rows at these positions: a LongTensor (order and repeats count), a bool mask, or a slice.

        >>> batch.rows(torch.tensor([1])).row.tolist()
        [1]
        """
        positions = torch.arange(len(self))[index if isinstance(index, slice) else index.cpu()].tolist()
        picked = {name: column[index] for name, column in self.columns().items()}
        return Batch(**picked, extras={name: [values[i] for i in positions] for name, values in self.extras.items()})

    def to(self, device: torch.device | str) -> Batch:
        """Returns the batch with all columns on this device; the copies to it are not waited for.

        >>> batch.to("cpu").row.device
        device(type='cpu')
        """
        return self.with_(**{name: to_device(column, device) for name, column in self.columns().items()})

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Joins all rows of all batches: prompts padded on the left, responses on the right, to the longest. Padding is
        0, of `versions` `NOBODY`; an extra that a batch lacks is None in its rows.

        >>> len(paddock.Batch.concat([batch, batch]))
        4
        """
        filled = {frozenset(b.columns()) for b in batches}
        if len(filled) != 1:
            raise ValueError(f"batches to join differ in columns: {[sorted(names) for names in filled]}")
        parts = [b.columns() for b in batches]
        joined = {name: join(name, [part[name] for part in parts]) for name in parts[0]}
        names = dict.fromkeys(name for b in batches for name in b.extras)
        kept = {name: [value for b in batches for value in b.extras.get(name, [None] * len(b))] for name in names}
        return Batch(**joined, extras=kept)


COLUMNS = tuple(f.name for f in fields(Batch) if f.name != "extras")
PER_ROW = frozenset({"row", "group", "lengths", "done", "baseline_scores"})
PER_PROMPT = frozenset({"prompts", "prompt_mask", "prompt_experts"})
PER_TOKEN = frozenset(COLUMNS) - PER_ROW - PER_PROMPT


def join(name: str, parts: list[Tensor]) -> Tensor:
    if name in PER_ROW:
        return torch.cat(parts)
    longest = max(part.shape[1] for part in parts)
    left = name in PER_PROMPT
    missing = [longest - part.shape[1] for part in parts]
    behind = (0, 0) * (parts[0].dim() - 2)  # of what a token has several of
    pads = [(*behind, gap, 0) if left else (*behind, 0, gap) for gap in missing]
    padding = NOBODY if name == "versions" else 0
    return torch.cat([torch.nn.functional.pad(part, pad, value=padding) for part, pad in zip(parts, pads, strict=True)])


def require_one_turn(batch: Batch, reason: str, *, key: str, value: Any, fix: str) -> None:
    """Refuses a batch in which the policy wrote several turns, by the setting that cannot serve them."""
    several = (batch.turn_counts() > 1).nonzero()[:, 0]
    if len(several):
        row, turns = int(batch.row[several[0]]), int(batch.turn_counts()[several[0]])
        raise UserError(f"{reason}, and row {row} has {turns} turns of the policy", key=key, value=value, fix=fix)
