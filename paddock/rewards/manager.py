"""Responses become scores: picks the scorer, runs it where it can do no harm, and puts its number on the last token."""

from __future__ import annotations

import functools
import logging
import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from paddock.algorithms.selection import overlong_penalty
from paddock.config.rewards import PYTHON, Part
from paddock.config.schema import RewardModelConfig
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.rewards.functions import Target, shape_of
from paddock.rewards.rules import NAMED, NOTHING, SCORERS, Scorer, prepared, rule_of, scorer_of
from paddock.rewards.runners import LimitedPool, ProcessPool
from paddock.rewards.score import Failed, Score, ScoreRequest
from paddock.rewards.scoring import Known, ScoreColumn, Scoring, combined, where
from paddock.rewards.sending import Sender
from paddock.rewards.threads import ThreadPool
from paddock.sandbox.program import settings_of

log = logging.getLogger(__name__)

Functions = Mapping[str, Callable[..., Any]]
NO_FUNCTIONS: Functions = {}

PRINTS = "reward.log"
"""File in the run's folder with all that scorers print, also through programs that they start."""


class RewardManager:
    """Scores responses. A context manager: its processes end with it.

    Every manager but `batch` calls the scorer for each response, in processes; `rate_limited` several at a time. A
    function of TRL's contract is called once with all responses.

    Rules by name and functions are components: each is a column and a metric, and the score is their weighted sum. One
    function in our own form, without a weight, is the score itself and no component.

    >>> with RewardManager(config.reward_model) as rewards:
    ...     rewards.check(requests)                       # before training: a response of each source
    ...     batch, metrics = rewards.fill(batch, texts)
    ...
    ...     scoring = rewards.begin()                     # or, while responses are still generated
    ...     scoring.add({index: rewards.request(row, number, text)})
    ...     batch, metrics = rewards.finish(batch, scoring.collect())
    """

    def __init__(
        self,
        config: RewardModelConfig,
        named: Sequence[Scorer] = (),
        *,
        weighted: bool = False,
        environment_pays: bool = False,
        loops_may_score: bool = False,
        total_steps: int = 1,
        folder: Path | None = None,
    ):
        """`named`: all that the config names (`named_scorers`); without any, each row's data_source picks a rule.

        `weighted`: the config gives weights. `environment_pays`: rows whose data_source has no rule get nothing here.
        `loops_may_score`: agent loops of the user's may answer. `folder`: that of the run, whose file `PRINTS` takes
        what processes that score print; without it their standard output is this process's.
        """
        self.config, self.named, self.weighted = config, named, weighted
        self.environment_pays, self.loops_may_score = environment_pays, loops_may_score
        self.prints = folder and folder / PRINTS
        self.printed = size_of(self.prints)
        """Bytes that scorers of earlier starts of the run printed."""
        nobody_takes, key = "no built-in scorer takes", "reward_model.compute_score_kwargs"
        require_options(key, config.compute_score_kwargs, SCORERS.values(), nobody_takes)
        self.scorers: dict[str, Scorer] = {}
        self.names: dict[str, None] = {}
        """What scorers returned so far beside the score. Every batch gets all these columns: batches can be joined."""
        self.known = Known()
        self.rule_pool = ProcessPool(self.config.num_workers or 1, self.config.timeout, self.prints)
        limited = self.config.reward_manager == "rate_limited"
        self.pool = LimitedPool(self.config, self.prints) if limited else self.rule_pool
        """The pool of user functions."""
        self.threads = ThreadPool(self.config.timeout)
        """Scores by functions of this program that processes cannot be given."""
        self.sender = Sender(self.rule_pool)
        self.warned_of_unscored = False
        self.steps_done, self.total_steps = 0, total_steps
        """The run's progress, for functions of TRL's contract that ask for it."""
        if self.config.reward_kwargs.overlong_buffer_cfg.enable:
            self._overlong(torch.zeros(1))  # a wrong length is an error now, not after the first rollout

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.pool.close()
        self.rule_pool.close()
        self.threads.close()
        self.sender.close()
        self.warn_of_prints()
        if self.prints and not size_of(self.prints):
            self.prints.unlink(missing_ok=True)

    def warn_of_prints(self) -> None:
        """Says where the prints of scorers are, once there are any."""
        if size_of(self.prints) > self.printed:
            self.printed = inf
            log.warning("reward functions print: what they print is in %s", self.prints)

    def check(self, requests: Sequence[ScoreRequest]) -> None:
        """Tries every scorer that these will need, so that a missing or broken scorer stops the run at once."""
        if self.loops_may_score:  # what a loop tells functions, and whether it scores itself, is known once it has run
            requests = [request for request in requests if rule_of(request.data_source)]
        if self.reads_environments or (self.loops_may_score and self.named):
            self._columns()  # imports them; what they read is there once an episode has run
            return
        scorers = self.named or [self._scorer(request) for request in requests]
        self._warn_of_unused_arguments(scorers, requests)
        if any(scorer.sandboxed for scorer in scorers):
            from paddock.sandbox.runner import check

            check(settings_of(self.config))
        requests = [replace(request, steps=(self.steps_done, self.total_steps)) for request in requests]
        scores = []
        for column in self._columns():
            # twice each for a function of whole batches: a list with a single score would pass for a row
            times = 2 if column.whole and self.of_trl else 1
            column.add(dict(enumerate(requests * times)))
            scores.append(column.collect()[: len(requests)])
            for request, score in zip(requests, scores[-1], strict=True):
                if score.timed_out:
                    reason = f"took longer than {self.pool.timeout:g} s (reward_model.timeout)"
                    raise self._error(column.scorer_of(request), request, Failed(reason))
        rows = combined(self.components, scores)
        self.names |= dict.fromkeys(name for score in rows for name in score.extras)
        self.warn_of_prints()

    def pays(self, requests: Sequence[ScoreRequest]) -> bool:
        """True unless all that scores these is the rule that leaves the reward to the environment."""
        return (
            bool(self.named)
            or self.loops_may_score
            or any(self._scorer(request).target.name != NOTHING for request in requests)
        )

    def begin(self) -> Scoring:
        """Takes responses as they come, and scores them meanwhile."""
        return Scoring(self._columns(), self.components)

    def _columns(self) -> list[ScoreColumn]:
        """Returns one column per rule or function that the config names; without any, a column for all rows."""
        if not self.parts:
            return [ScoreColumn(self._scorer, self.pool, self.known, self._error)]
        return [self._column(part) for part in self.parts]

    def _column(self, part: Scorer) -> ScoreColumn:
        scorer = self.sender.current(part)
        pool: ProcessPool | ThreadPool = self.pool if part.own else self.rule_pool
        if part.here or part.shape.reads_environments:
            pool = self.threads
        return ScoreColumn(lambda _: scorer, pool, self.known, self._error, part.shape)

    @functools.cached_property
    def parts(self) -> list[Scorer]:
        """All that the config names, with how each is called. A process imports functions of files: they may do
        anything."""
        return [self._loaded(part) if part.own else part for part in self.named]

    def _loaded(self, part: Scorer) -> Scorer:
        target = part.target
        if target.function is not None:
            part = replace(part, shape=shape_of(target.function, target.batch))
            return replace(part, here=self.sender.obstacle_to(part))
        try:
            shape = self.rule_pool.shape_of(target)
            if shape.of_trl and self.config.reward_manager == "rate_limited":
                reason = "takes a whole batch, and reward_model.reward_manager=rate_limited calls it for one response"
                fix = "name `completion` in place of `completions`, or choose another reward_manager"
                raise Failed(reason, fix=fix)
        except Failed as error:
            key, fix = "custom_reward_function.path", error.fix or SHAPES
            raise UserError(f"{target.name} {error}", key=key, value=target.path, fix=fix) from None
        return replace(part, shape=shape)

    @functools.cached_property
    def components(self) -> list[Scorer]:
        """Those of which each is a column and a metric: none if a function in our own form is the score itself."""
        single = len(self.parts) == 1 and self.parts[0].own and not self.weighted
        return [] if single and not self.of_trl else self.parts

    @functools.cached_property
    def of_trl(self) -> bool:
        """True if a function has TRL's contract."""
        return any(part.shape.of_trl for part in self.parts)

    @functools.cached_property
    def reads_environments(self) -> bool:
        """True if a function asks for the environments of conversations."""
        return any(part.shape.reads_environments for part in self.parts)

    @functools.cached_property
    def reads_tokens(self) -> bool:
        """True if a function may ask for the token ids of responses."""
        return any(part.shape.reads_prompts for part in self.parts)

    def score(self, requests: Sequence[ScoreRequest | None]) -> list[Score]:
        """Returns one score per request, 0 for None; a UserError names the first that gave none."""
        scoring = self.begin()
        scoring.add(dict(enumerate(requests)))
        return scoring.collect()

    def fill(self, batch: Batch, texts: Sequence[str]) -> tuple[Batch, dict[str, float]]:
        """`finish` with the scores of `texts`, the decoded responses to rows that the batch's extras describe."""
        tokens = batch.answers() if self.reads_tokens else [()] * len(batch)
        columns = ({name: values[index] for name, values in batch.extras.items()} for index in range(len(batch)))
        rows = zip(columns, batch.row.tolist(), texts, tokens, strict=True)
        return self.finish(batch, self.score([self.request(*row) for row in rows]))

    def request(
        self,
        columns: Mapping[str, Any],
        number: int,
        text: str,
        tokens: Sequence[int] = (),
        last_turn: str | None = None,
    ) -> ScoreRequest | None:
        """Returns what scorers are asked of a response; None if a reward model or its own agent loop scores it.

        `columns`: what its row and its environment say, by the names of a batch's columns. `number`: its id. `tokens`:
        where the manager `reads_tokens`. `last_turn`: the text of the policy's last turn, if it wrote several.
        """
        if columns.get("style") == "model" or columns.get("reward_score") is not None:
            return None
        location = columns.get("location")
        whole: dict[str, Any] = {}
        if self.reads_tokens:
            whole = {
                "prompt": columns.get("written_prompt", columns.get("messages")),
                "tokens": array("q", tokens),  # takes half as long as a list on its way to another process
                "steps": (self.steps_done, self.total_steps),
                "environment": columns.get("environment"),
            }
        return ScoreRequest(
            columns["data_source"],
            text,
            columns["ground_truth"],
            columns.get("extra_info") or {},
            f"{location} (row id {number})" if location else f"row {number}",
            last_turn=last_turn,
            turns=columns.get("completion", columns.get("conversation")),
            extra_fields=columns.get("extra_fields") or {},
            **whole,
        )

    def finish(self, batch: Batch, scores: Sequence[Score]) -> tuple[Batch, dict[str, float]]:
        """The batch with `scores` and, as extras, `score` and whatever else the scorers returned; and their means.

        A response whose scoring was cut off has zeros in columns of numbers; a row whose scorer does not return what
        others return has None there.
        """
        self.names |= dict.fromkeys(name for score in scores for name in score.extras)
        self.warn_of_prints()
        values = torch.tensor([score.value for score in scores])
        columns = columns_of(scores, self.names, every_row_has_acc=self.config.reward_manager == "dapo")
        overlong = self.config.reward_kwargs.overlong_buffer_cfg
        if overlong.enable:
            penalty = self._overlong(batch.policy_lengths().cpu())
            values = values + penalty
            if overlong.log:
                columns |= {"overlong_reward": penalty.tolist(), "overlong": (penalty < 0).tolist()}
        metrics = {
            f"reward/{name}/mean": mean for name, column in columns.items() if (mean := mean_of(column)) is not None
        }
        for part in self.components:
            metrics[f"reward/{part.name}/std"] = std_of(columns.get(part.name, ()))
        if self.of_trl:
            unscored = [index for index, score in enumerate(scores) if not score.applies]
            metrics["reward/unscored"] = float(len(unscored))
            if unscored and not self.warned_of_unscored:
                self.warned_of_unscored = True
                row = (batch.extras.get("location") or {unscored[0]: f"row {int(batch.row[unscored[0]])}"})[unscored[0]]
                log.warning(
                    "every reward function returned None for a response to %s, which scores 0. Further ones count in "
                    "reward/unscored", row,
                )  # fmt: skip
        metrics["reward/timeouts"] = float(sum(score.timed_out for score in scores))
        metrics["reward/cache_hits"] = float(sum(score.cached for score in scores))
        scorers = [*self.scorers.values(), *self.named]
        if any(scorer.limit < inf for scorer in scorers):
            metrics["reward/math_undecided"] = float(sum(score.undecided for score in scores))
        if self.config.reward_manager == "rate_limited":
            metrics["reward/retries"] = float(sum(score.retries for score in scores))
        return batch.with_(
            scores=on_last_token(values, batch.need("mask")), extras={**batch.extras, **columns}
        ), metrics

    def _scorer(self, request: ScoreRequest) -> Scorer:
        """Returns the rule that the data source of the response picks."""
        source = request.data_source
        if source not in self.scorers:
            rule = scorer_of(source, self.environment_pays)
            self.scorers[source] = rule.with_arguments(self.config.compute_score_kwargs, self.config)
        return self.scorers[source]

    def _error(self, scorer: Scorer, request: ScoreRequest, failure: Failed) -> UserError:
        target = scorer.target
        reason = f"{target.name} {failure}, {where(request)}"
        if not self.named:
            fix = "mend the row, or score with a function of your own: custom_reward_function.path=my_reward.py"
            return UserError(reason, key="reward", value=target.path, fix=fix)
        if not scorer.own:
            fix = f"mend the row, or choose another rule: {', '.join(NAMED)}"
            return UserError(reason, key="reward", value=scorer.name, fix=fix)
        returns = "a finite number, or a dict with one under 'score'"
        if scorer.shape.of_trl:
            returns = "a list with a finite number, or None, for each completion"
        fix = failure.fix or f"mend the function: it returns {returns}"
        if scorer.here:
            fix = f"{fix}. It runs in a thread, as it cannot be sent to a process: {scorer.here}"
        value = target if target.path == PYTHON else target.path
        return UserError(reason, key="custom_reward_function.path", value=value, fix=fix)

    def _warn_of_unused_arguments(self, scorers: Sequence[Scorer], requests: Sequence[ScoreRequest]) -> None:
        """Names arguments that built-in scorers have, but none of those that these rows' data sources pick."""
        taken = {name for scorer in scorers for name in scorer.options}
        for name in self.config.compute_score_kwargs:
            if requests and name not in taken:
                sources = ", ".join(dict.fromkeys(request.data_source for request in requests))
                log.warning(
                    "reward_model.compute_score_kwargs.%s has no effect: no scorer of %s takes it", name, sources
                )

    def _overlong(self, lengths: PerRow) -> PerRow:
        kwargs = self.config.reward_kwargs
        buffer = kwargs.overlong_buffer_cfg
        return overlong_penalty(lengths, kwargs.max_resp_len, buffer.len, buffer.penalty_factor)


SHAPES = (
    "name a function in it, custom_reward_function.path=FILE.py:FUNCTION, that is written as "
    "compute_score(data_source, solution_str, ground_truth, extra_info), or as TRL's "
    "reward(prompts, completions, **columns)"
)


def named_scorers(
    parts: Sequence[Part], arguments: Mapping[str, Any], config: RewardModelConfig, functions: Functions
) -> list[Scorer]:
    """Returns the rules and functions that the config names. `arguments`: those of rules, the key `reward_kwargs`.
    `functions`: those of this program that the config names as `python:NAME`."""
    scorers = []
    for part in parts:
        if part.path is None:
            rule = NAMED[part.function].with_arguments(prepared(part.function, arguments), config)
            scorers.append(replace(rule, weight=part.weight))
        else:
            scorers.append(function_at(part, config, functions))
    rules = [scorer for scorer in scorers if not scorer.own]
    require_options("reward_kwargs", arguments, rules, f"{' and '.join(rule.name for rule in rules)} takes no")
    return scorers


def function_at(part: Part, config: RewardModelConfig, functions: Functions) -> Scorer:
    function = functions.get(part.function) if part.path == PYTHON else None
    if part.path == PYTHON and function is None:
        raise UserError(
            "is a function of the program that made this run, and this is another",
            key="custom_reward_function.path",
            value=f"{PYTHON}:{part.function}",
            fix="run that program again; or put the function into a file, custom_reward_function.path=FILE.py:NAME",
        )
    target = Target(str(part.path), part.function, part.kwargs, function, batch=config.reward_manager == "batch")
    return Scorer(target, part.name, part.weight, own=True)


def require_options(key: str, given: Mapping[str, Any], rules: Iterable[Scorer], nobody_takes: str) -> None:
    """Refuses an argument that none of the rules takes."""
    options = sorted({name for rule in rules for name in rule.options})
    for name in given:
        if name not in options:
            fix = suggest(name, options) if options else "leave it out: there are no arguments"
            raise UserError(f"{nobody_takes} {name!r}", key=key, value=dict(given), fix=fix)


def on_last_token(values: PerRow, mask: PerToken) -> PerToken:
    """Puts each row's value on the last token that the policy wrote; a row without such a token gets zeros."""
    positions = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = positions.masked_fill(mask == 0, -1).amax(-1, keepdim=True)
    return torch.where(positions == last, values.to(mask.device)[:, None], 0.0)


def columns_of(scores: Sequence[Score], names: Iterable[str], every_row_has_acc: bool) -> dict[str, list[Any]]:
    """Returns what the scorers returned, one entry per row. `acc` may be asked for where a scorer returns a bare
    number."""
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


def std_of(column: Sequence[float | None]) -> float:
    """Over the rows that have a value (population); 0 if none has."""
    numbers = [value for value in column if value is not None]
    return statistics.pstdev(numbers) if numbers else 0.0


def size_of(path: Path | None) -> float:
    """Returns the bytes of the file; 0 if there is none."""
    return path.stat().st_size if path and path.exists() else 0
