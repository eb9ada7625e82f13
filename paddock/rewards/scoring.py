"""Scores the responses of a batch: starts calls as responses come, waits for all together, and sums several scorers."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from typing import Any

from paddock.errors import UserError
from paddock.rewards.functions import ROW, Shape, Target, load
from paddock.rewards.rules import Scorer
from paddock.rewards.runners import ProcessPool, ScoringJob
from paddock.rewards.score import Failed, Score, ScoreRequest
from paddock.rewards.threads import ThreadPool

log = logging.getLogger(__name__)

MOST_KNOWN = 65_536  # scores, some 300 bytes each
NO_RULE = Score(0.0)

Blame = Callable[[Scorer, ScoreRequest, Failed], UserError]
Requests = Mapping[int, ScoreRequest | None]
"""Responses by their index in a batch; None: no rule scores the row."""


def where(request: ScoreRequest) -> str:
    """Names a response and its row, for messages."""
    return (
        f"on {request.location} (data_source={request.data_source}, ground_truth={request.ground_truth!r:.60}, "
        f"response {request.solution!r:.120})"
    )


class Known:
    """Keeps the most recently used scores by scorer, ground truth and response; a future until its score has come."""

    def __init__(self, most: int = MOST_KNOWN):
        self.most = most
        self.scores: OrderedDict[bytes, Score | Future[Any]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: bytes) -> Score | Future[Any] | None:
        with self.lock:
            if key in self.scores:
                self.scores.move_to_end(key)
            return self.scores.get(key)

    def expect(self, key: bytes, future: Future[Any]) -> None:
        """Keeps the score of a job that is about to begin."""
        with self.lock:
            self.scores.pop(key, None)
            self.scores[key] = future
            while len(self.scores) > self.most:
                self.scores.popitem(last=False)
        future.add_done_callback(lambda future: self._arrived(key, future))

    def _arrived(self, key: bytes, future: Future[Any]) -> None:
        """Forgets a score that was cut off: another time the machine may be less busy. A scorer that gave up by itself
        remembers that, and answers at once."""
        scores = None if future.cancelled() or future.exception() else future.result()
        with self.lock:
            if self.scores.get(key) is future:
                del self.scores[key]
                if scores and not scores[0].timed_out:
                    self.scores[key] = scores[0]


def key_of(target: Target, request: ScoreRequest) -> bytes:
    parts = (target.path, target.name, repr(target.kwargs), repr(request.ground_truth), request.solution)
    texts = [part.encode(errors="surrogatepass") for part in parts]
    lengths = ",".join(str(len(text)) for text in texts)  # so that no two lists of parts join to one text
    return hashlib.blake2b(lengths.encode() + b":" + b"".join(texts), digest_size=16).digest()


class Scoring:
    """The responses of one batch. `add` returns while they are being scored; `collect` waits for all of them."""

    def __init__(self, columns: Sequence[ScoreColumn], components: Sequence[Scorer]):
        """`components`: the scorer of each column; none if the only column's scores are the scores."""
        self.columns, self.components = columns, components

    def add(self, requests: Requests) -> None:
        """Starts scoring requests. Raises if a request of this or an earlier call is known to have failed."""
        for column in self.columns:
            column.add(requests)

    def collect(self) -> list[Score]:
        """Returns the scores in the order of the indices; a UserError names the first that has no score."""
        for column in self.columns:
            column.start()  # side by side
        scores = [column.collect() for column in self.columns]
        return combined(self.components, scores)

    def so_far(self) -> dict[int, Score]:
        """Returns the scores that have come, by index."""
        columns = [column.so_far() for column in self.columns]
        there = [index for index in columns[0] if all(index in column for column in columns)]
        scores = combined(self.components, [[column[index] for index in there] for column in columns])
        return dict(zip(there, scores, strict=True))

    def __contains__(self, index: int) -> bool:
        return index in self.columns[0].scores or index in self.columns[0].requests


class ScoreColumn:
    """The scores that one scorer, or the rule of each row's data source, gives to the responses of a batch."""

    def __init__(
        self,
        scorer_of: Callable[[ScoreRequest], Scorer],
        pool: ProcessPool | ThreadPool,
        known: Known,
        blame: Blame,
        shape: Shape = ROW,
    ):
        self.scorer_of, self.pool, self.known, self.blame = scorer_of, pool, known, blame
        self.whole = shape.whole
        self.requests: dict[int, ScoreRequest] = {}
        self.scores: dict[int, Score] = {}
        """Scores that are known already."""
        self.away: list[tuple[Future[Any], tuple[int, ...]]] = []
        """Calls that have begun, each with the indices of the requests that it scores."""
        self.shared: set[int] = set()
        """Indices that wait for the score of an equal, earlier request."""
        self.broken = False
        """True once a call has failed."""

    def add(self, requests: Requests) -> None:
        jobs: list[ScoringJob] = []
        try:
            for index, request in requests.items():
                if request is None:
                    self.scores[index] = NO_RULE
                else:
                    self._begin(index, request, jobs)
        except BaseException:
            for job in jobs:
                job.future.cancel()  # it is not submitted: whoever has an equal request must not wait for it
            raise
        jobs.sort(key=lambda job: str(job.target))  # neighbours with one scorer share a chunk
        self.pool.submit(jobs)
        if self.broken:
            self._results()

    def _begin(self, index: int, request: ScoreRequest, jobs: list[ScoringJob]) -> None:
        """Scores the request if that is done here; appends a job for it if it is a call of its own."""
        scorer = self.scorer_of(request)
        if request.last_turn is not None and not scorer.own:
            request = replace(request, solution=request.last_turn)
        if request.environment is not None and not isinstance(self.pool, ThreadPool):
            request = replace(request, environment=None)  # it lives here
        self.requests[index] = request
        if self.whole:
            return
        if not scorer.pooled:
            try:
                (self.scores[index],) = load(scorer.target)([request])
            except Failed as error:
                raise self.blame(scorer, request, error) from error
            return
        key = key_of(scorer.target, request) if scorer.pure else b""
        equal = self.known.get(key)
        if isinstance(equal, Score):
            self.scores[index] = replace(equal, cached=True)
        elif equal is not None:
            self.away.append((equal, (index,)))
            self.shared.add(index)
        else:
            jobs.append(self._job(scorer, (index,)))
            if key:
                self.known.expect(key, jobs[-1].future)

    def _job(self, scorer: Scorer, indices: tuple[int, ...]) -> ScoringJob:
        job = ScoringJob(scorer.target, tuple(self.requests[index] for index in indices), scorer.limit)
        job.future.add_done_callback(self._look)
        self.away.append((job.future, indices))
        return job

    def _look(self, future: Future[Any]) -> None:
        self.broken |= not future.cancelled() and future.exception() is not None

    def so_far(self) -> dict[int, Score]:
        found = dict(self.scores)
        for future, indices in self.away:
            if future.done() and not future.cancelled() and not future.exception() and (scores := future.result()):
                found |= zip(indices, scores, strict=True)
        return found

    def start(self) -> None:
        """Begins the call of a scorer that takes a whole batch: all responses are there."""
        if self.whole and self.requests and not self.away:
            indices = tuple(sorted(self.requests))
            self.pool.submit([self._job(self.scorer_of(self.requests[indices[0]]), indices)])

    def collect(self) -> list[Score]:
        self.start()
        for (_, indices), scores in zip(self.away, self._results(), strict=True):
            if scores is None:
                scores = [self._cut_off(indices)]
            elif indices[0] in self.shared:
                scores = [replace(scores[0], cached=True)]
            self.scores |= zip(indices, scores, strict=True)
        return [self.scores[index] for index in sorted(self.scores)]

    def _results(self) -> list[list[Score] | None]:
        """Waits for the scores of all calls; None for a call that was cut off."""
        try:
            return self.pool.results([future for future, _ in self.away])
        except Failed as error:
            indices = next(each for future, each in self.away if future.done() and future.exception() is error)
            raise self._failure(indices, error) from None

    def _failure(self, indices: tuple[int, ...], error: Failed) -> UserError:
        request = self.requests[indices[error.row or 0]]
        if len(indices) > 1 and error.row is None:
            request = replace(request, location=f"{len(indices)} responses, the first of {request.location}")
        return self.blame(self.scorer_of(request), request, error)

    def _cut_off(self, indices: tuple[int, ...]) -> Score:
        if self.whole:
            raise self._failure(indices, Failed(f"took longer than {self.pool.timeout:g} s (reward_model.timeout)"))
        request = self.requests[indices[0]]
        scorer = self.scorer_of(request)
        if not self.pool.warned and scorer.limit == inf:
            self.pool.warned = True
            log.warning(
                "%s took longer than %g s (reward_model.timeout) %s, which scores %g; %s. Further ones count in "
                "reward/timeouts",
                *(scorer.target.name, self.pool.timeout, where(request), scorer.failed, self.pool.late),
            )
        return Score(scorer.failed, timed_out=True, undecided=scorer.limit < inf)


def combined(components: Sequence[Scorer], columns: Sequence[list[Score]]) -> list[Score]:
    """Returns for each row the weighted sum of its components' scores, with each component's own value among the
    extras; without components the only column."""
    return [summed(components, scores) for scores in zip(*columns, strict=True)] if components else columns[0]


def summed(components: Sequence[Scorer], scores: Sequence[Score]) -> Score:
    if scores[0] is NO_RULE:
        return NO_RULE
    pairs = list(zip(components, scores, strict=True))
    extras: dict[str, Any] = {scorer.name: score.value if score.applies else None for scorer, score in pairs}
    for scorer, score in pairs:
        for name, value in score.extras.items():
            if name in extras:
                raise UserError(
                    f"returns {name!r} beside its score, and another value has that name: each is a column and a "
                    "metric",
                    key="custom_reward_function.path" if scorer.own else "reward",
                    value=str(scorer.target) if scorer.own else scorer.name,
                    fix="return it under another name, or return the score alone",
                )
            extras[name] = value
    return Score(
        sum(scorer.weight * score.value for scorer, score in pairs),
        extras,
        timed_out=any(score.timed_out for score in scores),
        undecided=any(score.undecided for score in scores),
        cached=all(score.cached for score in scores),
        retries=sum(score.retries for score in scores),
        applies=any(score.applies for score in scores),
    )
