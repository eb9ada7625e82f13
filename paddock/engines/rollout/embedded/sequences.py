"""Sequences in flight: what each slot continues, what it has drawn, and who leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded.sampling import require_finite, sample, uniforms
from paddock.engines.rollout.embedded.slots import Slots


@dataclass(frozen=True)
class Request:
    """A prompt and the responses that start from one prefill of it."""

    tokens: list[int]
    rows: list[int]
    first: int  # place of its first response among the answers to the call

    @staticmethod
    def split(prompts: Iterable[Prompt], most: int) -> list[Request]:
        """At most as many rows each as there are slots: a prompt with more of them is prefilled again for the rest."""
        requests, place = [], 0
        for prompt in prompts:
            for start in range(0, len(prompt.rows), most):
                rows = prompt.rows[start : start + most]
                requests.append(Request(prompt.tokens, rows, place))
                place += len(rows)
        return requests


class Sequences:
    """Columns of one entry a slot; the live sequences hold the first slots, without gaps.

    All that changes from token to token is a tensor on the model's device. A finished sequence draws on until `retire`,
    which several steps may precede, but keeps its length and its answer.
    """

    def __init__(self, slots: Slots, sampling: Sampling, device: torch.device):
        self.slots = slots
        self.sampling = sampling
        self.live = 0
        self.sources: list[tuple[int, int]] = []  # of each live slot: place of its response, and its row
        count, width = slots.count, sampling.max_tokens + 1  # the last column is never read: see `draw`
        self.token = torch.zeros(count, dtype=torch.long, device=device)
        self.length = torch.zeros(count, dtype=torch.long, device=device)
        self.drawn = torch.zeros(count, dtype=torch.long, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self.numbers = torch.zeros(count, width, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(count, width, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(count, width, device=device)
        stops = () if sampling.ignore_eos else sorted(sampling.stop_tokens)
        self.stops = torch.tensor(stops, dtype=torch.long, device=device)

    def arrivals(self, waiting: deque[Request], budget: int) -> list[Request]:
        """The next requests that find a slot for each row, their prompts within the token budget, but at least one."""
        free = self.slots.count - self.live
        found: list[Request] = []
        while waiting and len(waiting[0].rows) <= free and (not found or len(waiting[0].tokens) <= budget):
            found.append(waiting.popleft())
            free -= len(found[-1].rows)
            budget -= len(found[-1].tokens)
        return found

    def admit(self, requests: list[Request]) -> list[range]:
        """Gives each request its slots. `draw` of their first tokens is to follow."""
        targets, start = [], self.live
        for request in requests:
            targets.append(range(self.live, self.live + len(request.rows)))
            self.sources += [(request.first + i, row) for i, row in enumerate(request.rows)]
            self.length[targets[-1].start : targets[-1].stop] = len(request.tokens)
            self.live = targets[-1].stop
        rows = torch.tensor([row for _, row in self.sources[start:]], device=self.length.device)
        self.numbers[start : self.live, :-1] = uniforms(rows, self.sampling)
        self.drawn[start : self.live] = 0
        self.done[start : self.live] = False
        return targets

    def draw(self, logits: Tensor, start: int = 0) -> None:
        """The next token of each live slot from `start` on. What a finished one draws falls behind its last token."""
        span = slice(start, self.live)
        drawn, done = self.drawn[span], self.done[span]
        place = drawn[:, None]
        token, log_prob = sample(logits, self.numbers[span].gather(1, place)[:, 0], self.sampling)
        self.tokens[span].scatter_(1, place, token[:, None])
        self.log_probs[span].scatter_(1, place, log_prob[:, None])
        self.token[span] = token
        drawn += ~done
        done |= (token[:, None] == self.stops).any(1) | (drawn == self.sampling.max_tokens)

    def retire(self) -> list[tuple[int, Completion]]:
        """Finished responses with their places. The last sequences move into the slots that become free."""
        finished = self.done[: self.live].nonzero()[:, 0].tolist()
        if not finished:
            return []
        found = self.completions(finished)
        left, gone = self.live - len(finished), set(finished)
        holes = [slot for slot in finished if slot < left]
        movers = [slot for slot in range(left, self.live) if slot not in gone]
        self.move(movers, holes)
        self.live = left
        del self.sources[left:]
        return found

    def completions(self, finished: list[int]) -> list[tuple[int, Completion]]:
        at = torch.tensor(finished, device=self.done.device)
        counts, tokens, log_probs = (column[at].tolist() for column in (self.drawn, self.tokens, self.log_probs))
        require_finite(self.log_probs[at])
        stops = set(self.stops.tolist())
        return [
            (self.sources[slot][0], Completion(self.sources[slot][1], words[:n], chances[:n], words[n - 1] in stops))
            for slot, n, words, chances in zip(finished, counts, tokens, log_probs, strict=True)
        ]

    def move(self, movers: list[int], holes: list[int]) -> None:
        if not movers:
            return
        sources, targets = (torch.tensor(slots, device=self.done.device) for slots in (movers, holes))
        self.slots.move(sources, targets, int(self.length[sources].max()))
        for column in (self.token, self.length, self.drawn, self.done, self.numbers, self.tokens, self.log_probs):
            column[targets] = column[sources]
        for mover, hole in zip(movers, holes, strict=True):
            self.sources[hole] = self.sources[mover]
