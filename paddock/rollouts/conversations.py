"""Many conversations over one engine session: turns are decoded together, and nobody waits for another's tool."""

from __future__ import annotations

import itertools
import math
import queue
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from paddock.engines.rollout.base import Completion, Limits, Request, RolloutEngine, Sampling, Until
from paddock.rollouts.conversation import Conversation
from paddock.rollouts.episode import Episode
from paddock.rollouts.waits import TimeLimit, Wanted

TICK = 0.01  # seconds of decode between two looks at tools that run
FIRST = 0.1  # seconds that the first prompts wait for each other
AT_ONCE = 32
"""Conversations that go on before the next launch even if the engine's device runs dry meanwhile."""
SWITCH = 0.0005  # seconds; Python's default is ten times as long
OnEpisodes = Callable[[list[Episode]], None]


@dataclass
class Clock:
    """Adds up the seconds of sessions: all, those in which the engine worked, and those in which it did not although a
    request could have run."""

    total: float = 0.0
    working: float = 0.0
    idle: float = 0.0


class Conversations:
    """Drives conversations over one session of an engine.

    A conversation is a generator that waits for a turn of the policy or for something that runs beside the decode. As
    soon as it has what it waits for it goes on, and its next turn joins those that are decoded. `deterministic`: the
    next turns are submitted when all are there, in the order of rows, so that the same rows are always decoded
    together and bits depend on nobody's speed.
    """

    def __init__(self, engine: RolloutEngine, slots: int | None = None, clock: Clock | None = None):
        """`slots`: sequences that the engine holds at a time, if it is known. `clock`: takes the seconds."""
        self.engine, self.slots = engine, slots
        self.conversations: dict[int, Conversation] = {}
        """By keys that count up."""
        self.generators: dict[int, Generator[Wanted | Future[Any], Any, Episode]] = {}
        """Conversations that have not ended."""
        self.ready: queue.SimpleQueue[tuple[int, Future[Any], float]] = queue.SimpleQueue()
        self.waiting: dict[int, tuple[Future[Any], float]] = {}
        """What runs beside the decode for a conversation, and when its time is up: in this order, for all have the same
        time."""
        self.wanted: dict[int, Wanted] = {}
        """Turns that are to be submitted."""
        self.flying: dict[int, Wanted] = {}
        """Turns that the engine computes."""
        self.parked: set[int] = set()
        """Conversations whose keys and values the engine keeps."""
        self.served: deque[tuple[int, Any, BaseException | None]] = deque()
        """Conversations that have what they waited for, and are to go on."""
        self.over: list[int] = []
        """Parked conversations that have ended: the engine may free what it keeps of them."""
        self.episodes: dict[int, Episode] = {}
        """Episodes of conversations that have ended."""
        self.clock = clock or Clock()
        self.runnable_since = math.inf
        """When the engine could have gone on to work."""
        self.paused_at = 0.0
        self.keys = itertools.count()

    def begin(self, conversations: Sequence[Conversation]) -> None:
        """Adds conversations and runs each until it waits for something; for the first prompts it waits a moment."""
        try:
            for conversation in conversations:
                key = next(self.keys)
                self.conversations[key], self.generators[key] = conversation, conversation.run()
                self.go_on(key)
            if conversations:
                self.gather_first()
        except BaseException:
            self.cancel()
            raise

    def run(self, version: int, on_done: OnEpisodes | None = None, until: Until | None = None) -> list[Episode]:
        """Runs all conversations to their end in a session of weights of this version, or until those that `until`
        names by id have ended; returns those that have, in their order. `on_done` hears of those that end while others
        do not, which go on in the next session: what is drawn of their turns stays, and tools run on meanwhile."""
        begun = time.perf_counter()
        pause = time.monotonic() - self.paused_at
        self.waiting = {key: (future, end + pause) for key, (future, end) in self.waiting.items()}
        for conversation in self.conversations.values():
            conversation.version = version
        try:
            self.engine.resume(self.sampling, self.limits(parts=until is not None))
            try:
                with threads_in_turn(SWITCH):
                    self.drive(on_done, until)
            except BaseException:
                self.engine.abandon()
                raise
            self.carry(self.engine.pause())
        except BaseException:
            self.cancel()
            raise
        self.clock.total += time.perf_counter() - begun
        ended, self.episodes = self.episodes, {}
        for key in ended:
            del self.conversations[key]
        return [ended[key] for key in sorted(ended)]

    def drive(self, on_done: OnEpisodes | None, until: Until | None) -> None:
        """Lets the engine and the conversations take turns until enough of them have ended."""
        told, ids = 0, {episode.id for episode in self.episodes.values()}
        while not (until and until.reached(ids)) and self.generators:
            may_wait = not self.flying and not self.served
            self.take_ready(block=may_wait and (self.deterministic or not self.wanted))
            self.go_on_next()
            self.submit()
            self.advance(until.look if until else None)
            ids = {episode.id for episode in self.episodes.values()}
            if on_done and self.generators and len(self.episodes) > told:
                on_done(list(self.episodes.values())[told:])
                told = len(self.episodes)

    def carry(self, parts: Iterable[Completion]) -> None:
        """Notes where the turns of a session that is over go on in the next."""
        for part in parts:
            self.conversations[part.key].keep(part)
            self.flying[part.key] = self.flying[part.key].after(part)
        self.wanted |= self.flying
        self.flying, self.over, self.paused_at = {}, [], time.monotonic()
        self.parked.clear()

    @property
    def first(self) -> Conversation:
        return next(iter(self.conversations.values()))

    @property
    def sampling(self) -> Sampling:
        return self.first.sampling

    @property
    def deterministic(self) -> bool:
        return self.first.setting.deterministic

    def go_on_next(self) -> None:
        """Resumes the conversations that have what they waited for, as many as there is time for until the engine needs
        its next launch."""
        for resumed in range(len(self.served)):
            if resumed >= AT_ONCE and not self.deterministic and not self.engine.can_wait():
                return
            self.go_on(*self.served.popleft())

    def go_on(self, key: int, value: Any = None, error: BaseException | None = None) -> None:
        """Resumes a conversation with what it waited for, and notes what it waits for next."""
        generator = self.generators[key]
        try:
            found = generator.send(value) if error is None else generator.throw(error)
        except StopIteration as end:
            del self.generators[key]
            self.episodes[key] = end.value
            if key in self.parked:
                self.over.append(key)
            return
        if isinstance(found, Wanted):
            self.wanted[key] = found
            return
        self.waiting[key] = found, time.monotonic() + self.first.setting.limits.tool_timeout
        found.add_done_callback(lambda future: self.ready.put((key, future, time.perf_counter())))

    def gather_first(self) -> None:
        """Waits for the first prompts, so that those of a group are computed once; for slow ones a moment only."""
        until = time.monotonic() + FIRST
        while self.waiting and (self.deterministic or not self.wanted or time.monotonic() < until):
            self.take_ready(block=True, most=None if self.deterministic or not self.wanted else FIRST)
            while self.served:
                self.go_on(*self.served.popleft())

    def limits(self, parts: bool = False) -> Limits:
        """Returns room for all prompts; for one whose conversation is computed anew, if there are more than slots or
        turns that do not go on from the one before. `parts`: the session may end before they do."""
        prompt = self.first.setting.prompt_length
        found = Limits.of(self.requests(self.wanted)).requests + [(prompt, 1)] * len(self.waiting)
        crowded = self.slots is not None and len(self.conversations) > self.slots
        extend, most = all(one.extends for one in self.conversations.values()), self.sampling.max_tokens
        whole = max((len(one.tokens) + one.limit for one in self.wanted.values()), default=0)
        if self.waiting or parts or not extend:  # turns may come of which nothing is known yet
            whole = max(whole, prompt + most)
        if crowded or parts or not extend:
            found.append((whole, 1))
        return Limits(found, whole, None if extend else whole, parts)

    def requests(self, wanted: dict[int, Wanted]) -> list[Request]:
        """Returns a request for each turn; first turns of equal prompts of a group are one."""
        together: dict[Any, list[int]] = {}
        for key in sorted(wanted):
            one, row = wanted[key], self.conversations[key].row
            name = key if one.start else (row.group, one.keep, one.limit, tuple(one.tokens))
            together.setdefault(name, []).append(key)
        found = []
        for keys in together.values():
            one, first = wanted[keys[0]], self.conversations[keys[0]]
            rows = [self.conversations[key].id for key in keys]
            found.append(Request(one.tokens, keys, rows, first.sampling.step, one.limit, one.start, first.row.images,
                                 one.keep, one.written))  # fmt: skip
        return found

    def take_ready(self, block: bool, most: float | None = None) -> None:
        """Takes note of calls that have returned, or took too long; waits for one, if it is to."""
        if block and self.waiting:
            left = next(iter(self.waiting.values()))[1] - time.monotonic()
            seconds = max(0.0, left if most is None else min(left, most))
            with suppress(queue.Empty):
                key, future, self.runnable_since = self.ready.get(timeout=seconds)
                self.returned(key, future)
        while not self.ready.empty():
            self.returned(*self.ready.get()[:2])
        while self.waiting:
            key, (future, deadline) = next(iter(self.waiting.items()))
            if deadline > time.monotonic():
                return
            del self.waiting[key]
            future.cancel()
            self.served.append((key, None, TimeLimit()))

    def returned(self, key: int, future: Future[Any]) -> None:
        if self.waiting.get(key, (None,))[0] is not future:
            return  # its time was up
        del self.waiting[key]
        error = CancelledError() if future.cancelled() else future.exception()
        self.served.append((key, None if error else future.result(), error))

    def submit(self) -> None:
        """Hands the engine the turns that are wanted, and tells it which conversations are over."""
        if self.deterministic and (self.flying or self.waiting or self.served):
            return
        self.over += [key for key, one in self.wanted.items() if one.anew and key in self.parked]
        self.forget_over()
        if self.wanted:
            self.engine.submit(self.requests(self.wanted))
            self.parked -= self.wanted.keys()
            self.flying |= self.wanted
            self.wanted = {}

    def forget_over(self) -> int:
        over, self.over = self.over, []
        self.engine.forget(over)
        self.parked.difference_update(over)
        return len(over)

    def advance(self, look: float | None = None) -> None:
        """Lets the engine work until a turn is finished; for a moment if tools are running, or for `look` seconds, and
        for one launch if conversations are to go on."""
        if not self.flying:
            return
        begun = time.perf_counter()
        self.clock.idle += max(0.0, begun - self.runnable_since)
        seconds = None if self.deterministic else 0.0 if self.served else TICK if self.waiting else look
        found = self.engine.advance(seconds)
        self.runnable_since = time.perf_counter()
        self.clock.working += self.runnable_since - begun
        for completion in found:
            if self.flying.pop(completion.key).keep:
                self.parked.add(completion.key)
            self.served.append((completion.key, self.conversations[completion.key].whole(completion), None))
        stuck = not found and (seconds is None or self.runnable_since < begun + seconds)
        if stuck:
            self.make_room()

    def make_room(self) -> None:
        """Frees what the engine keeps of conversations that wait for a tool, so that others begin; their next turn is
        computed from its first token on."""
        while self.deterministic and self.waiting:
            self.take_ready(block=True)
            self.go_on_next()
        if self.forget_over():
            return
        keys = sorted(self.parked)[: len(self.flying)]
        assert keys, "the engine does nothing, and keeps nothing that could be freed"
        self.engine.forget(keys)
        self.parked.difference_update(keys)

    def cancel(self) -> None:
        """Cancels what still runs beside the decode, after an error."""
        for future, _ in self.waiting.values():
            future.cancel()
        self.waiting.clear()
        for generator in self.generators.values():
            generator.close()


@contextmanager
def threads_in_turn(seconds: float) -> Iterator[None]:
    """Limits how long a thread keeps the interpreter while another waits for it, as the engine does for tools."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
