"""Responses become scores: picks the scorer, runs it where it can do no harm, and puts its number on the last token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paddock.algorithms.selection import overlong_penalty
from paddock.config.schema import Config
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.errors import UserError
from paddock.rewards.custom import Failed, Target, load
from paddock.rewards.pool import JobFailed, Pool
from paddock.rewards.rules import Scorer, scorer_of
from paddock.rewards.score import Score, ScoreRequest

TIMEOUT = 30.0  # seconds for one response
ONE_BY_ONE = ("naive", "prime", "dapo", "gdpo")
"""Managers that call the scorer for each response; all of them in processes here."""


class RewardManager:
    """Scores responses. A context manager: its processes end with it.

    >>> with RewardManager(config) as rewards:
    ...     rewards.check(requests)                       # before training: one response of each source
    ...     batch, metrics = rewards.fill(batch, texts)
    """

    def __init__(self, config: Config, timeout: float = TIMEOUT):
        self.config = config.reward_model
        self._refuse_what_is_not_built()
        custom = config.custom_reward_function
        self.custom = Scorer(Target(custom.path, custom.name, custom.reward_kwargs)) if custom.path else None
        self.names: dict[str, None] = {}
        """What scorers returned so far beside the score. Every batch gets all these columns: batches can be joined."""
        self.pool = Pool(self.config.num_workers or 1, timeout)
        if self.config.reward_kwargs.overlong_buffer_cfg.enable:
            self._overlong(torch.zeros(1))  # a wrong length is an error now, not after the first rollout

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.pool.close()

    def check(self, requests: Sequence[ScoreRequest]) -> None:
        """Tries every scorer that these will need, so that a missing or broken one stops the run before it begins."""
        for request, score in zip(requests, self.score(requests), strict=True):
            if score.timed_out:
                raise self._error(request, f"took longer than {self.pool.timeout:g} s")

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One score for each request, each scorer called once; a UserError names the first that gave none."""
        scorers = [self._scorer(request) for request in requests]
        scores: list[Score | None] = [None] * len(requests)
        pooled = [place for place, scorer in enumerate(scorers) if scorer.pooled]
        for place in sorted(set(range(len(requests))) - set(pooled)):
            scores[place] = self._here(scorers[place], requests[place])
        try:
            found = self.pool.run([(scorers[place].target, requests[place]) for place in pooled])
        except JobFailed as error:
            raise self._error(requests[pooled[error.job]], error.reason) from None
        for place, score in zip(pooled, found, strict=True):
            scores[place] = score
        self.names.update(dict.fromkeys(name for score in scores if score for name in score.extras))
        return [s or Score(scorer.failed, timed_out=True) for s, scorer in zip(scores, scorers, strict=True)]

    def fill(self, batch: Batch, texts: Sequence[str]) -> tuple[Batch, dict[str, float]]:
        """The batch with `scores` and, as extras, `score` and whatever else the scorers returned; and their means.

        `texts` are the decoded responses. A response whose scoring was cut off has zeros in columns of numbers; a row
        whose scorer does not return what others return has None there.
        """
        scores = self.score(requests_of(batch, texts))
        values = torch.tensor([score.value for score in scores])
        columns = columns_of(scores, self.names, every_row_has_acc=self.config.reward_manager == "dapo")
        overlong = self.config.reward_kwargs.overlong_buffer_cfg
        if overlong.enable:
            penalty = self._overlong(batch.need("lengths").cpu())
            values = values + penalty
            if overlong.log:
                columns |= {"overlong_reward": penalty.tolist(), "overlong": (penalty < 0).tolist()}
        metrics = {
            f"reward/{name}/mean": mean for name, column in columns.items() if (mean := mean_of(column)) is not None
        }
        metrics["reward/timeouts"] = float(sum(score.timed_out for score in scores))
        return batch.with_(
            scores=on_last_token(values, batch.need("mask")), extras={**batch.extras, **columns}
        ), metrics

    def _scorer(self, request: ScoreRequest) -> Scorer:
        return self.custom or scorer_of(request.data_source)

    def _here(self, scorer: Scorer, request: ScoreRequest) -> Score:
        try:
            return load(scorer.target)(request)
        except Failed as error:
            raise self._error(request, str(error)) from error

    def _error(self, request: ScoreRequest, reason: str) -> UserError:
        target = self._scorer(request).target
        return UserError(
            f"{target.name} {reason}, on {request.place} (data_source={request.data_source}, "
            f"ground_truth={request.ground_truth!r:.60}, response {request.solution!r:.120})",
            key="custom_reward_function.path" if self.custom else "reward",
            value=target.path,
            fix="mend the function: it returns a finite number, or a dict with one under 'score'"
            if self.custom
            else "mend the row, or score with a function of your own: custom_reward_function.path=my_reward.py",
        )

    def _overlong(self, lengths: PerRow) -> PerRow:
        kwargs = self.config.reward_kwargs
        buffer = kwargs.overlong_buffer_cfg
        return overlong_penalty(lengths, kwargs.max_resp_len, buffer.len, buffer.penalty_factor)

    def _refuse_what_is_not_built(self) -> None:
        if self.config.enable:
            raise UserError(
                "reward models are not built yet", key="reward_model.enable", value=True, fix="leave it out"
            )
        if self.config.reward_manager not in ONE_BY_ONE:
            raise UserError(
                "is not built yet",
                key="reward_model.reward_manager",
                value=self.config.reward_manager,
                fix=f"one of {', '.join(ONE_BY_ONE)}",
            )


def requests_of(batch: Batch, texts: Sequence[str]) -> list[ScoreRequest]:
    extras, rows = batch.extras, batch.row.tolist()
    nothing: list[Any] = [None] * len(rows)
    columns = (extras["data_source"], texts, extras["ground_truth"], extras.get("extra_info", nothing),
               extras.get("place", nothing), rows)  # fmt: skip
    return [
        ScoreRequest(source, text, truth, extra or {}, f"{place} (row id {row})" if place else f"row {row}")
        for source, text, truth, extra, place, row in zip(*columns, strict=True)
    ]


def on_last_token(values: PerRow, mask: PerToken) -> PerToken:
    """Each row's value on the last token that the policy wrote; a row in which it wrote none has no place for one."""
    positions = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = positions.masked_fill(mask == 0, -1).amax(-1, keepdim=True)
    return torch.where(positions == last, values.to(mask.device)[:, None], 0.0)


def columns_of(scores: Sequence[Score], names: Iterable[str], every_row_has_acc: bool) -> dict[str, list[Any]]:
    """What the scorers returned, one entry a row. `acc` may be asked for where a scorer returns a bare number."""
    columns: dict[str, list[Any]] = {"score": [score.value for score in scores]}
    for name in names:
        given = [score.extras[name] for score in scores if name in score.extras]
        absent = 0.0 if all(isinstance(value, bool | int | float) for value in given) else None
        columns[name] = [score.extras.get(name, absent if score.timed_out else None) for score in scores]
    if every_row_has_acc:
        columns["acc"] = [score.extras.get("acc", 0.0 if score.timed_out else score.value) for score in scores]
    return columns


def mean_of(column: Sequence[Any]) -> float | None:
    numbers = [float(value) for value in column if isinstance(value, bool | int | float)]
    return sum(numbers) / len(numbers) if numbers else None
