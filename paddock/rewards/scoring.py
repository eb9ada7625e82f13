"""Responses on their way to scores: begun one by one, as they come, and waited for together."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from typing import Any

from paddock.errors import UserError
from paddock.rewards.custom import Failed, Target, load
from paddock.rewards.pool import Job, JobFailed, Pool
from paddock.rewards.rules import Scorer
from paddock.rewards.score import Score, ScoreRequest

MOST_KNOWN = 65_536  # scores, some 300 bytes each
NO_RULE = Score(0.0)

Blame = Callable[[ScoreRequest, str], UserError]


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

    def __init__(self, scorer_of: Callable[[ScoreRequest], Scorer], pool: Pool, known: Known, blame: Blame):
        self.scorer_of, self.pool, self.known, self.blame = scorer_of, pool, known, blame
        self.requests: dict[int, ScoreRequest] = {}
        self.here: dict[int, Score] = {}
        self.away: dict[int, Future[Any]] = {}
        self.keys: dict[int, bytes] = {}
        """Of those that are away and will be known."""
        self.shared: set[int] = set()
        """Places that wait for an earlier one's score."""
        self.broken = False
        """One of those that are away has failed."""

    def add(self, requests: Mapping[int, ScoreRequest | None]) -> None:
        """By place in the batch; None where no rule scores the row. Raises if one of these, or of those before, is
        known to have failed."""
        jobs = []
        for place, request in requests.items():
            if request is None:
                self.here[place] = NO_RULE
                continue
            self.requests[place] = request
            scorer = self.scorer_of(request)
            if not scorer.pooled:
                self.here[place] = self._score_here(scorer, request)
            elif not self._is_known(place, scorer):
                jobs.append(Job(scorer.target, request, scorer.limit))
                self.away[place] = jobs[-1].future
                jobs[-1].future.add_done_callback(self._look)
                if place in self.keys:
                    self.known.put(self.keys[place], jobs[-1].future)
        jobs.sort(key=lambda job: str(job.target))  # neighbours with one scorer share a chunk
        self.pool.submit(jobs)
        if self.broken:
            self._wait()

    def start(self) -> None:
        """Begins what waits for the last response; here nothing does."""

    def collect(self) -> list[Score]:
        """In the order of the places; a UserError names the first that has no score."""
        found = self._wait()
        for place, key in self.keys.items():
            self.known.put(key, None if found[place] is None or found[place].timed_out else found[place])
        scores = self.here | {place: self._score_of(place, score) for place, score in found.items()}
        return [scores[place] for place in sorted(scores)]

    def __contains__(self, place: int) -> bool:
        return place in self.here or place in self.requests

    def _is_known(self, place: int, scorer: Scorer) -> bool:
        """Takes the score, or waits for it, where an equal response has one or is about to."""
        if not scorer.pure:
            return False
        key = key_of(scorer.target, self.requests[place])
        found = self.known.get(key)
        if isinstance(found, Score):
            self.here[place] = replace(found, cached=True)
        elif found is not None:
            self.away[place] = found
            self.shared.add(place)
        else:
            self.keys[place] = key
        return found is not None

    def _score_here(self, scorer: Scorer, request: ScoreRequest) -> Score:
        try:
            return load(scorer.target)(request)
        except Failed as error:
            raise self.blame(request, str(error)) from error

    def _look(self, future: Future[Any]) -> None:
        self.broken |= not future.cancelled() and future.exception() is not None

    def _wait(self) -> dict[int, Any]:
        try:
            return dict(zip(self.away, self.pool.results(list(self.away.values())), strict=True))
        except JobFailed as error:
            raise self.blame(self.requests[list(self.away)[error.job]], error.failure.reason) from None

    def _score_of(self, place: int, score: Score | None) -> Score:
        if score is None:
            scorer = self.scorer_of(self.requests[place])
            return Score(scorer.failed, timed_out=True, undecided=scorer.limit < inf)
        return replace(score, cached=True) if place in self.shared else score


class BatchScoring(Scoring):
    """One call with lists, when all responses are there."""

    job: Job | None = None

    def add(self, requests: Mapping[int, ScoreRequest | None]) -> None:
        for place, request in requests.items():
            if request is None:
                self.here[place] = NO_RULE
            else:
                self.requests[place] = request

    def start(self) -> None:
        if self.job is None and self.requests:
            requests = tuple(self.requests[place] for place in sorted(self.requests))
            self.job = Job(self.scorer_of(requests[0]).target, requests)
            self.pool.submit([self.job])

    def _wait(self) -> dict[int, Any]:
        self.start()
        if self.job is None:
            return {}
        places = sorted(self.requests)
        requests = [self.requests[place] for place in places]
        whole = replace(requests[0], place=f"{len(requests)} responses, the first of {requests[0].place}")
        try:
            (scores,) = self.pool.results([self.job.future])
        except JobFailed as error:
            row, reason = error.failure.row, error.failure.reason
            raise self.blame(whole if row is None else requests[row], reason) from None
        if scores is None:
            raise self.blame(whole, f"took longer than {self.pool.timeout:g} s (reward_model.timeout)")
        return dict(zip(places, scores, strict=True))
