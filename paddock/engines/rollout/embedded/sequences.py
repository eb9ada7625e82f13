"""Sequences in flight: what each slot continues, what it has drawn, and which are finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paddock.core.device import CopyStream, Launched, to_device
from paddock.engines.rollout.base import Completion, Request, Sampling
from paddock.engines.rollout.embedded.routes import Routes, chosen
from paddock.engines.rollout.embedded.sampling import filters, require_finite, sample, uniforms
from paddock.engines.rollout.stops import StopTable
from paddock.errors import UserError
from paddock.kernels.arguments import Draws
from paddock.kernels.choice import kernels_for
from paddock.kernels.launch import can_launch, has_triton
from paddock.models.attention import Attention

if has_triton():
    from paddock.kernels.sampling import fill_uniforms
    from paddock.kernels.statistics import log_probs

STOPS = 256  # stop tokens there is room for


class KeyValues(Protocol):
    """The KV cache of the sequences in flight. The live ones are numbered 0, 1, ... without gaps."""

    count: int
    """Sequences at a time."""

    def begin(self) -> None:
        """Forgets all sequences."""
        return

    def admit(self, requests: Sequence[Request]) -> int:
        """Reserves room behind the live sequences for the first of these requests; returns for how many."""
        ...

    def release(self, rows: Sequence[int]) -> None:
        """Frees what these finished sequences hold; `move` and `shrink` are to follow."""
        return

    def move(self, sources: Tensor, targets: Tensor, movers: Sequence[int], holes: Sequence[int], held: Tensor) -> None:
        """Gives sequences the numbers of finished ones; `held`: tokens that each of them has."""
        ...

    def shrink(self, left: int) -> None:
        """Drops the sequences behind the first `left`."""
        return

    def park(self, row: int, tokens: int) -> Any:
        """Takes what a sequence of so many tokens holds out of the live ones; `unpark` or `give` is to follow."""
        ...

    def unpark(self, rows: range, held: Sequence[Any]) -> None:
        """Gives parked sequences these numbers, behind the live ones."""
        ...

    def give(self, held: Any) -> None:
        """Frees what a parked sequence holds, where that does not end with the last reference to it."""
        return

    def prefill(self, lengths: Sequence[int], targets: Sequence[range], device: torch.device) -> Attention: ...

    def extend(self, new: Sequence[NewTokens]) -> Extension | None:
        """Makes ready the tokens that a decode step computes beside its own, if there are any."""
        ...

    def decode(self, lengths: Tensor, done: Tensor, beside: Extension | None) -> Attention:
        """Returns the attention of a decode step: a query for each of the first sequences, and behind them one for each
        token of `beside`. Results of `done` sequences are not used."""
        ...


class NewTokens(NamedTuple):
    """What a conversation goes on with: tokens of a live sequence whose keys and values are not stored yet. The last
    one is not among them: a decode step reads it as it reads a token that was drawn."""

    row: int
    held: int
    """Tokens of the sequence before them."""
    tokens: list[int]
    offset: int
    """Position - token index: see `Images`."""


@dataclass(frozen=True, eq=False)
class Extension:
    """New tokens of some sequences, as rows of a decode step: one query each. The last ones may stand for nothing."""

    tokens: Tensor
    positions: Tensor
    where: Any
    """What the KV cache knows of their sequences."""

    @property
    def size(self) -> int:
        return len(self.tokens)


class PrefillSource(NamedTuple):
    """What a live slot continues."""

    key: int
    row: int
    parked: list[int] | None
    """The tokens that it continues, if it is parked when it is finished."""


@dataclass(frozen=True, eq=False)
class Parked:
    """A finished sequence whose keys and values wait for the next turn: those of all its tokens but the last."""

    tokens: list[int]
    held: Any


@dataclass(frozen=True)
class DoneFlags:
    """Flags of the live slots that are finished, on the host once the copy has been waited for."""

    done: Tensor
    copied: Launched


class Sequences:
    """Columns of one entry a slot; the live sequences hold the first slots, without gaps.

    All that changes from token to token is a tensor on the model's device, and stays where it is for all calls. A
    finished sequence draws on until `retire`, which several steps may precede, but keeps its length and its answer.

    `ahead`: the host reads the done flags of the launches before the last ones, so that the device never waits for it.
    """

    def __init__(self, slots: KeyValues, max_tokens: int, device: torch.device, ahead: bool):
        self.slots, self.ahead = slots, ahead
        self.copies = CopyStream(device)
        count, width = slots.count, max_tokens + 1  # the last column is never read: see `draw`
        self.token = torch.zeros(count, dtype=torch.long, device=device)
        self.length = torch.zeros(count, dtype=torch.long, device=device)
        self.offset = torch.zeros(count, dtype=torch.long, device=device)  # position - token index: see `Images`
        self.drawn = torch.zeros(count, dtype=torch.long, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self.limit = torch.zeros(count, dtype=torch.long, device=device)
        self.numbers = torch.zeros(count, width, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(count, width, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(count, width, device=device)
        self.stops = torch.full((STOPS,), -1, dtype=torch.long, device=device)
        self.state = torch.zeros(count, dtype=torch.long, device=device)  # in the table of stop strings
        self.minimum = torch.zeros(count, dtype=torch.long, device=device)
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)  # by a stop string

    def begin(self, sampling: Sampling, strings: StopTable | None = None) -> None:
        """`strings`: the table of the sampling's stop strings, if it has any."""
        self.sampling, self.strings = sampling, strings
        self.live = 0
        self.sources: list[PrefillSource] = []  # of each live slot
        self.parked: dict[int, Parked] = {}  # by key
        self.parks = False  # some are to be parked: then others wait for what the host does with them
        self.left: list[int] = []  # of each live slot: tokens it may still draw, were it not finished
        self.seen: DoneFlags | None = None
        self.routes: Routes | None = None
        self.slots.begin()
        stops = sorted(sampling.ends)
        if len(stops) > STOPS:
            raise UserError(f"there are {len(stops)} stop tokens; {STOPS} can be told apart", key="eos_token_id")
        self.stop_tokens = frozenset(stops)
        self.stops[:] = torch.tensor([*stops, *[-1] * (STOPS - len(stops))])
        self.early = self.stops[: len(stops)] if stops and sampling.min_tokens else None
        self.blank(0, len(self.done))

    def next_requests(self, waiting: deque[Request], budget: int) -> list[Request]:
        """Takes the next requests that find a slot for each row, with prompts within the token budget; at least one."""
        free = self.slots.count - self.live - len(self.parked)
        requests: list[Request] = []
        while waiting and len(waiting[0].rows) <= free and (not requests or len(waiting[0].tokens) <= budget):
            requests.append(waiting.popleft())
            free -= len(requests[-1].rows)
            budget -= len(requests[-1].tokens)
        taken = self.slots.admit(requests)
        waiting.extendleft(reversed(requests[taken:]))
        return requests[:taken]

    def unpark(self, requests: list[Request]) -> list[NewTokens]:
        """Gives parked sequences slots, as if the last token of each request had just been drawn; returns the tokens
        before it that are to be computed. A decode step is to follow."""
        kept = [self.parked.pop(request.keys[0]) for request in requests]
        rows = range(self.live, self.live + len(kept))
        self.slots.unpark(rows, [one.held for one in kept])
        self.admit(requests)
        last = torch.tensor([request.tokens[-1] for request in requests])
        self.token[rows.start : rows.stop] = last.to(self.token.device, non_blocking=True)
        self.length[rows.start : rows.stop] -= 1
        found = []
        for row, request, one in zip(rows, requests, kept, strict=True):
            held, offset = len(one.tokens) - 1, request.images.offset if request.images else 0
            found.append(NewTokens(row, held, request.tokens[held:-1], offset))
        return found

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            if parked := self.parked.pop(key, None):
                self.slots.give(parked.held)

    def admit(self, requests: list[Request]) -> list[range]:
        """Gives each request its slots. `draw` of their first tokens is to follow."""
        targets, start, lengths, limits = [], self.live, [], []
        for request in requests:
            targets.append(range(self.live, self.live + len(request.rows)))
            parked = request.tokens if request.keep else None
            self.sources += [
                PrefillSource(key, row, parked) for key, row in zip(request.keys, request.rows, strict=True)
            ]
            lengths += [len(request.tokens)] * len(request.rows)
            limits += [request.limit] * len(request.rows)
            self.live = targets[-1].stop
        device = self.length.device
        self.left += limits
        self.parks |= any(request.keep for request in requests)
        if any(request.images for request in requests):
            offsets = [request.images.offset if request.images else 0 for request in requests for _ in request.rows]
            self.offset[start : self.live] = torch.tensor(offsets).to(device, non_blocking=True)
        counters = [(row, request.step, request.start) for request in requests for row in request.rows]
        numbered = np.array([*zip(*counters, strict=True), limits, lengths], np.int64)
        columns = to_device(torch.from_numpy(numbered), device)
        self.limit[start : self.live], self.length[start : self.live] = columns[3:]
        numbers = self.numbers[start : self.live, : max(limits)]
        if can_launch(numbers):
            fill_uniforms(numbers, columns[:3], self.sampling.seed)
        else:
            rows, steps, starts = columns[:3]
            numbers.copy_(uniforms(rows, steps, starts, numbers.shape[1], self.sampling.seed))
        self.drawn[start : self.live] = 0
        self.done[start : self.live] = False
        if self.strings or self.sampling.min_tokens:
            self.admit_stops(requests, start)
        return targets

    def admit_stops(self, requests: list[Request], start: int) -> None:
        """Notes what each response has of a stop string already, and how many tokens must precede its end."""
        ends: list[tuple[int, int]] = []
        for request in requests:
            state = self.strings.begun(request) if self.strings else 0
            ends += [(state, request.minimum(self.sampling))] * len(request.rows)
        columns = to_device(torch.tensor(ends).t(), self.length.device)
        self.state[start : self.live], self.minimum[start : self.live] = columns
        self.ended[start : self.live] = False

    def draw(self, logits: Tensor, span: slice) -> None:
        """Draws the next token of each of these slots. A finished slot still samples; its sample goes to the column
        after its last token, which is never read."""
        if self.strings is None:
            return self.draw_tokens(logits, span)
        before = self.done[span].clone()
        self.draw_tokens(logits, span)
        state, ended = self.strings.step(self.state[span], self.token[span])
        self.state[span] = state
        self.ended[span] |= ended & ~before & (self.drawn[span] > self.minimum[span])
        self.done[span] |= self.ended[span]

    def draw_tokens(self, logits: Tensor, span: slice) -> None:
        drawn, done = self.drawn[span], self.done[span]
        kernels = kernels_for(logits)
        early = self.early_rows(span)
        if kernels and early is None and not filters(self.sampling):
            columns = (self.numbers[span], self.tokens[span], self.log_probs[span], self.token[span], drawn, done)
            draws = Draws(*columns, self.limit[span], self.stops)
            return kernels.draw(logits, draws, self.sampling.temperature)
        column = drawn[:, None]
        token, log_prob = sample(logits, self.numbers[span].gather(1, column)[:, 0], self.sampling, early, self.early)
        if can_launch(logits):
            log_prob = log_probs(logits, token, self.sampling.temperature)
        self.tokens[span].scatter_(1, column, token[:, None])
        self.log_probs[span].scatter_(1, column, log_prob[:, None])
        self.token[span] = token
        drawn += ~done
        done |= (token[:, None] == self.stops).any(1) | (drawn == self.limit[span])

    def early_rows(self, span: slice) -> Tensor | None:
        """Returns which of these slots may not draw a stop token yet; None if all may."""
        if self.early is None:
            return None
        early = self.drawn[span] < self.minimum[span]
        return early if self.ahead or early.any() else None  # a look at a GPU's would wait for it

    def aged(self, steps: int, start: int = 0) -> None:
        """Notes that the live slots from `start` on have drawn `steps` tokens."""
        for slot in range(start, self.live):
            self.left[slot] -= steps

    @property
    def longest_wait(self) -> int:
        """Steps after which every live sequence is finished."""
        return max(self.left, default=0)

    def retire(self) -> list[Completion]:
        """Returns finished responses. The last sequences move into the slots that become free."""
        if not self.ahead:
            self.seen = self.copy_done_flags()
        finished = []
        if self.seen:
            self.seen.copied.wait()
            finished = self.finish(self.seen.done.nonzero()[:, 0].tolist())
        if self.ahead:
            self.seen = self.copy_done_flags()
        return finished

    def copy_done_flags(self) -> DoneFlags:
        """Starts the copy of the flags to the host."""
        return DoneFlags(self.done[: self.live].to("cpu", non_blocking=True), Launched(self.done.device))

    def interrupt(self) -> list[Completion]:
        """Frees all slots; returns what their sequences have drawn."""
        flags = self.copy_done_flags()
        flags.copied.wait()
        return self.finish(list(range(self.live)), [not done for done in flags.done.tolist()])

    def finish(self, slots: list[int], interrupted: list[bool] | None = None) -> list[Completion]:
        """Frees these slots, or parks what they hold; returns their responses. `interrupted`: which are a part.

        Steps may be running: a finished sequence's tokens do not change, so they are read beside those.
        """
        if not slots:
            return []
        with self.copies.reading():
            at = torch.tensor(slots).to(self.done.device, non_blocking=True)
            drawn, tokens, log_probs, ended = (
                column[at].to("cpu", non_blocking=True)
                for column in (self.drawn, self.tokens, self.log_probs, self.ended)
            )
            experts = self.routes.of(slots, at) if self.routes else None
        completions, freed, likely = [], [], log_probs.numpy()
        require_finite(likely[np.arange(likely.shape[1]) < drawn.numpy()[:, None]])
        for i, (slot, count, all_tokens) in enumerate(zip(slots, drawn.tolist(), tokens.numpy(), strict=True)):
            source, own = self.sources[slot], all_tokens[:count].tolist()
            chose = chosen(experts[0][i], experts[1][i], count) if experts else None
            stopped = own[-1] in self.stop_tokens or bool(ended[i])
            finished = not (interrupted and interrupted[i])
            completions.append(
                Completion(source.row, own, likely[i, :count].tolist(), stopped, chose, source.key, finished)
            )
            if source.parked is None or interrupted:
                freed.append(slot)
            else:
                everything = source.parked + own
                self.parked[source.key] = Parked(everything, self.slots.park(slot, len(everything) - 1))
        self.slots.release(freed)
        self.close_gaps(slots)
        return completions

    def close_gaps(self, finished: list[int]) -> None:
        """Moves the last sequences into the slots of finished ones."""
        left, gone = self.live - len(finished), set(finished)
        holes = [slot for slot in finished if slot < left]
        movers = [slot for slot in range(left, self.live) if slot not in gone]
        self.move(movers, holes)
        self.slots.shrink(left)
        if self.routes:
            self.routes.shrink(left)
        self.blank(left, self.live)
        self.live = left
        del self.sources[left:], self.left[left:]

    def blank(self, start: int, stop: int) -> None:
        """Marks these slots as empty; a step that runs over them anyway does no harm."""
        self.length[start:stop] = 0
        self.offset[start:stop] = 0
        self.drawn[start:stop] = 0
        self.done[start:stop] = True
        self.ended[start:stop] = False

    def move(self, movers: list[int], holes: list[int]) -> None:
        if not movers:
            return
        sources, targets = (torch.tensor(s).to(self.done.device, non_blocking=True) for s in (movers, holes))
        self.slots.move(sources, targets, movers, holes, self.length[sources])
        for column in (self.token, self.length, self.offset, self.drawn, self.done, self.limit, self.numbers,
                       self.tokens, self.log_probs, self.state, self.minimum, self.ended):  # fmt: skip
            column[targets] = column[sources]
        if self.routes:
            self.routes.move(movers, holes)
        for mover, hole in zip(movers, holes, strict=True):
            self.sources[hole], self.left[hole] = self.sources[mover], self.left[mover]
