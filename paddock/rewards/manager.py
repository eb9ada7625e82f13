"""Responses become scores: picks the scorer, runs it where it can do no harm, and puts its number on the last token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch

from paddock.algorithms.selection import overlong_penalty
from paddock.config.schema import Config
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.rewards.custom import Target
from paddock.rewards.limited import LimitedPool
from paddock.rewards.pool import Pool
from paddock.rewards.rules import SCORERS, Scorer, scorer_of
from paddock.rewards.score import Score, ScoreRequest
from paddock.rewards.scoring import BatchScoring, Known, Scoring


class RewardManager:
    """Scores responses. A context manager: its processes end with it.

    Every manager but `batch` calls the scorer for each response, in processes; `rate_limited` several at a time.

    >>> with RewardManager(config) as rewards:
    ...     rewards.check(requests)                       # before training: one response of each source
    ...     batch, metrics = rewards.fill(batch, texts)
    ...
    ...     scoring = rewards.begin()                     # or, while responses are still generated
    ...     scoring.add({place: request})
    ...     batch, metrics = rewards.finish(batch, scoring.collect())
    """

    def __init__(self, config: Config):
        self.config = config.reward_model
        custom = config.custom_reward_function
        self.custom = Scorer(Target(custom.path, custom.name, custom.reward_kwargs)) if custom.path else None
        self._require_a_use_for_arguments()
        self.scorers: dict[str, Scorer] = {}
        self.names: dict[str, None] = {}
        """What scorers returned so far beside the score. Every batch gets all these columns: batches can be joined."""
        self.known = Known()
        self.pool = self._pool()
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
        if any(self._scorer(request).settings is not None for request in requests):
            from paddock.rewards.sandbox.program import settings_of
            from paddock.rewards.sandbox.runner import check

            check(settings_of(self.config))
        scores = self.score(requests)
        for request, score in zip(requests, scores, strict=True):
            if score.timed_out:
                raise self._error(request, f"took longer than {self.pool.timeout:g} s (reward_model.timeout)")
        self._remember_names(scores)

    def begin(self) -> Scoring:
        """Takes responses as they come, and scores them meanwhile."""
        kind = BatchScoring if self.custom and self.config.reward_manager == "batch" else Scoring
        return kind(self._scorer, self.pool, self.known, self._error)

    def score(self, requests: Sequence[ScoreRequest | None]) -> list[Score]:
        """One score for each request, 0 for None; a UserError names the first that gave none."""
        scoring = self.begin()
        scoring.add(dict(enumerate(requests)))
        return scoring.collect()

    def fill(self, batch: Batch, texts: Sequence[str]) -> tuple[Batch, dict[str, float]]:
        """`finish` with the scores of `texts`, the decoded responses."""
        return self.finish(batch, self.score(requests_of(batch, texts)))

    def finish(self, batch: Batch, scores: Sequence[Score]) -> tuple[Batch, dict[str, float]]:
        """The batch with `scores` and, as extras, `score` and whatever else the scorers returned; and their means.

        A response whose scoring was cut off has zeros in columns of numbers; a row whose scorer does not return what
        others return has None there.
        """
        self._remember_names(scores)
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
        metrics["reward/cache_hits"] = float(sum(score.cached for score in scores))
        if any(scorer.limit < inf for scorer in self.scorers.values()):
            metrics["reward/math_undecided"] = float(sum(score.undecided for score in scores))
        if self.config.reward_manager == "rate_limited":
            metrics["reward/retries"] = float(sum(score.retries for score in scores))
        return batch.with_(
            scores=on_last_token(values, batch.need("mask")), extras={**batch.extras, **columns}
        ), metrics

    def _remember_names(self, scores: Sequence[Score]) -> None:
        self.names.update(dict.fromkeys(name for score in scores for name in score.extras))

    def _pool(self) -> Pool:
        config = self.config
        processes = config.num_workers or 1
        if config.reward_manager != "rate_limited":
            return Pool(processes, config.timeout)
        if not self.custom:
            raise UserError(
                "limits the calls of a function of your own, and none is named",
                key="reward_model.reward_manager",
                value=config.reward_manager,
                fix="custom_reward_function.path=my_reward.py, or reward_model.reward_manager=naive",
            )
        return LimitedPool(
            processes,
            config.timeout,
            concurrent=config.max_concurrent,
            per_minute=config.max_rpm,
            tokens_per_minute=config.max_tpm,
            tokens_per_call=config.estimated_tokens_per_request,
            retries=config.max_retries,
        )

    def _scorer(self, request: ScoreRequest) -> Scorer:
        if self.custom:
            return self.custom
        source = request.data_source
        if source not in self.scorers:
            scorer, given = scorer_of(source), self.config.compute_score_kwargs
            kwargs = {name: value for name, value in given.items() if name in scorer.options}
            if scorer.settings:
                kwargs |= scorer.settings(self.config)
            self.scorers[source] = replace(scorer, target=replace(scorer.target, kwargs=kwargs))
        return self.scorers[source]

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

    def _require_a_use_for_arguments(self) -> None:
        """Arguments of built-in scorers that none of them takes, or that none is there to take."""
        given = self.config.compute_score_kwargs
        options = sorted({name for scorer in SCORERS.values() for name in scorer.options})
        unknown = [name for name in given if name not in options]
        if unknown or (given and self.custom):
            raise UserError(
                "your own function scores every row" if self.custom else f"no built-in scorer takes {unknown[0]!r}",
                key="reward_model.compute_score_kwargs",
                value=dict(given),
                fix="custom_reward_function.reward_kwargs" if self.custom else suggest(unknown[0], options),
            )

    def _overlong(self, lengths: PerRow) -> PerRow:
        kwargs = self.config.reward_kwargs
        buffer = kwargs.overlong_buffer_cfg
        return overlong_penalty(lengths, kwargs.max_resp_len, buffer.len, buffer.penalty_factor)


def requests_of(batch: Batch, texts: Sequence[str]) -> list[ScoreRequest | None]:
    return [request_of(batch, place, text) for place, text in zip(range(len(batch)), texts, strict=True)]


def request_of(batch: Batch, place: int, text: str) -> ScoreRequest | None:
    """What the scorer of this row is asked, once its response is there; None for a row that a reward model scores."""
    row = {name: values[place] for name, values in batch.extras.items()}
    if row.get("style") == "model":
        return None
    number, where = int(batch.row[place]), row.get("place")
    return ScoreRequest(
        row["data_source"],
        text,
        row["ground_truth"],
        row.get("extra_info") or {},
        f"{where} (row id {number})" if where else f"row {number}",
    )


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
