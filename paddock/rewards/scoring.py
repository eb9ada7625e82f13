"""Responses on their way to scores: begun one by one, as they come, and waited for together."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from typing import Any

from paddock.errors import UserError
from paddock.rewards.custom import Target, load
from paddock.rewards.pool import JobFailed, ProcessPool, ScoringJob
from paddock.rewards.rules import Scorer
from paddock.rewards.score import Failed, Score, ScoreRequest
from paddock.rewards.threads import ThreadPool
from paddock.rewards.worker import ScoringFailure, failure

log = logging.getLogger(__name__)

MOST_KNOWN = 65_536  # scores, some 300 bytes each
NO_RULE = Score(0.0)

Blame = Callable[[ScoreRequest, ScoringFailure], UserError]


def where(request: ScoreRequest) -> str:
    """Names a response and its row, for messages."""
    return (
        f"on {request.location} (data_source={request.data_source}, ground_truth={request.ground_truth!r:.60}, "
        f"response {request.solution!r:.120})"
    )


class Known:
    """Scores by scorer, ground truth and response, the most recently used; of one that is on its way, its future."""

    def __init__(self, most: int = MOST_KNOWN):
        self.most = most
        self.scores: OrderedDict[bytes, Score | Future[Any]] = OrderedDict()

    def get(self, key: bytes) -> Score | Future[Any] | None:
        found = self.scores.get(key)
        if isinstance(found, Future) and found.done():  # nobody collected it: whatever it was, it is not known
            return None
        if found is not None:
            self.scores.move_to_end(key)
        return found

    def put(self, key: bytes, found: Score | Future[Any] | None) -> None:
        """None forgets one that was cut off: another time the machine may be less busy. A scorer that gave up by itself
        remembers that, and answers at once."""
        self.scores.pop(key, None)
        if found is not None:
            self.scores[key] = found
        while len(self.scores) > self.most:
            self.scores.popitem(last=False)


def key_of(target: Target, request: ScoreRequest) -> bytes:
    parts = (target.path, target.name, repr(target.kwargs), repr(request.ground_truth), request.solution)
    texts = [part.encode(errors="surrogatepass") for part in parts]
    lengths = ",".join(str(len(text)) for text in texts)  # so that no two lists of parts join to one text
    return hashlib.blake2b(lengths.encode() + b":" + b"".join(texts), digest_size=16).digest()


class Scoring:
    """The responses of one batch. `add` returns while they are being scored; `collect` waits for all of them."""

    def __init__(
        self, scorer_of: Callable[[ScoreRequest], Scorer], pool: ProcessPool | ThreadPool, known: Known, blame: Blame
    ):
        self.scorer_of, self.pool, self.known, self.blame = scorer_of, pool, known, blame
        self.requests: dict[int, ScoreRequest] = {}
        self.here: dict[int, Score] = {}
        self.away: dict[int, Future[Any]] = {}
        self.keys: dict[int, bytes] = {}
        """Keys of the cache for the requests that are away."""
        self.shared: set[int] = set()
        """Indices that wait for the score of an equal, earlier request."""
        self.broken = False
        """True once a request that is away has failed."""
        self.reads_prompts = False
        """True if the scorer is given prompts."""

    def add(self, requests: Mapping[int, ScoreRequest | None]) -> None:
        """Starts scoring requests, by index in the batch; None: no rule scores the row. Raises if a request of this
        or an earlier call is known to have failed."""
        jobs: list[ScoringJob] = []
        try:
            self._prepare(requests, jobs)
        except BaseException:
            for job in jobs:
                job.future.cancel()  # it is not submitted: whoever has an equal request must not wait for it
            raise
        jobs.sort(key=lambda job: str(job.target))  # neighbours with one scorer share a chunk
        self.pool.submit(jobs)
        if self.broken:
            self._wait()

    def _prepare(self, requests: Mapping[int, ScoreRequest | None], jobs: list[ScoringJob]) -> None:
        """Scores what is scored here, and appends a job for each request that is not."""
        for index, request in requests.items():
            if request is None:
                self.here[index] = NO_RULE
                continue
            scorer = self.scorer_of(request)
            if request.last_turn is not None and not scorer.reads_turns:
                request = replace(request, solution=request.last_turn)
            self.requests[index] = request
            if not scorer.pooled:
                self.here[index] = self._score_here(scorer, request)
            elif not self._is_known(index, scorer):
                jobs.append(ScoringJob(scorer.target, request, scorer.limit))
                self.away[index] = jobs[-1].future
                jobs[-1].future.add_done_callback(self._look)
                if index in self.keys:
                    self.known.put(self.keys[index], jobs[-1].future)

    def start(self) -> None:
        """Begins what waits for the last response; here nothing does."""

    def collect(self) -> list[Score]:
        """Returns the scores in the order of the indices; a UserError names the first that has no score."""
        found = self._wait()
        for index, key in self.keys.items():
            self.known.put(key, None if found[index] is None or found[index].timed_out else found[index])
        scores = self.here | {index: self._score_of(index, score) for index, score in found.items()}
        return [scores[index] for index in sorted(scores)]

    def __contains__(self, index: int) -> bool:
        return index in self.here or index in self.requests

    def _is_known(self, index: int, scorer: Scorer) -> bool:
        """Takes the score, or waits for it, where an equal response has one or is about to."""
        if not scorer.pure:
            return False
        key = key_of(scorer.target, self.requests[index])
        found = self.known.get(key)
        if isinstance(found, Score):
            self.here[index] = replace(found, cached=True)
        elif found is not None:
            self.away[index] = found
            self.shared.add(index)
        else:
            self.keys[index] = key
        return found is not None

    def _score_here(self, scorer: Scorer, request: ScoreRequest) -> Score:
        try:
            return load(scorer.target)(request)
        except Failed as error:
            raise self.blame(request, failure(error)) from error

    def _look(self, future: Future[Any]) -> None:
        self.broken |= not future.cancelled() and future.exception() is not None

    def _wait(self) -> dict[int, Any]:
        try:
            return dict(zip(self.away, self.pool.results(list(self.away.values())), strict=True))
        except JobFailed as error:
            raise self.blame(self.requests[list(self.away)[error.job]], error.failure) from None

    def _score_of(self, index: int, score: Score | None) -> Score:
        if score is None:
            request = self.requests[index]
            scorer = self.scorer_of(request)
            if not self.pool.told and scorer.limit == inf:
                self.pool.told = True
                log.warning(
                    "%s took longer than %g s (reward_model.timeout) %s, which scores %g; %s. Further ones count in "
                    "reward/timeouts",
                    *(scorer.target.name, self.pool.timeout, where(request), scorer.failed, self.pool.late),
                )
            return Score(scorer.failed, timed_out=True, undecided=scorer.limit < inf)
        return replace(score, cached=True) if index in self.shared else score


class BatchScoring(Scoring):
    """Scores with one call that gets lists, when all responses are there."""

    job: ScoringJob | None = None

    def add(self, requests: Mapping[int, ScoreRequest | None]) -> None:
        for index, request in requests.items():
            if request is None:
                self.here[index] = NO_RULE
            else:
                self.requests[index] = request

    def start(self) -> None:
        if self.job is None and self.requests:
            requests = tuple(self.requests[index] for index in sorted(self.requests))
            self.job = ScoringJob(self.scorer_of(requests[0]).target, requests)
            self.pool.submit([self.job])

    def _wait(self) -> dict[int, Any]:
        self.start()
        if self.job is None:
            return {}
        indices = sorted(self.requests)
        requests = [self.requests[index] for index in indices]
        whole = replace(requests[0], location=f"{len(requests)} responses, the first of {requests[0].location}")
        try:
            (scores,) = self.pool.results([self.job.future])
        except JobFailed as error:
            row = error.failure.row
            raise self.blame(whole if row is None else requests[row], error.failure) from None
        if scores is None:
            raise self.blame(whole, ScoringFailure(f"took longer than {self.pool.timeout:g} s (reward_model.timeout)"))
        return dict(zip(indices, scores, strict=True))
