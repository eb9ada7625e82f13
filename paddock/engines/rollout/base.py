"""What a rollout engine does: tokens in, tokens and their log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from paddock.core.images import Images

if TYPE_CHECKING:
    from paddock.config.roles import ActorRolloutRefConfig
    from paddock.config.schema import DataConfig, TrainerConfig


@dataclass(frozen=True)
class Prompt:
    """One prompt and the ids of the responses wanted for it: len(rows) samples."""

    tokens: list[int]
    rows: list[int]
    images: Images | None = None
    """The images of the prompt, as the model sees them."""
    max_tokens: int | None = None
    """Most tokens of each response to it, if that is less than the sampling's."""

    def limit(self, sampling: Sampling) -> int:
        """Tokens at which a response to it ends, if no stop token did."""
        return sampling.max_tokens if self.max_tokens is None else min(self.max_tokens, sampling.max_tokens)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Randomness is a function of (seed, step, row, position) alone."""

    max_tokens: int
    stop_tokens: frozenset[int]
    seed: int
    step: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Stop strings: a response ends with the token whose text completes one."""
    min_tokens: int = 0
    """Tokens that stand before a stop token, or before a token that completes a stop string."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a response: none if the sampling ignores them."""
        return frozenset() if self.ignore_eos else self.stop_tokens


@dataclass(frozen=True, eq=False)
class Chosen:
    """The experts that tokens went to, ``[tokens, layers, k]`` each."""

    prompt: Tensor
    response: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chosen):
            return NotImplemented
        return torch.equal(self.prompt, other.prompt) and torch.equal(self.response, other.response)

    def behind(self, prompt: int) -> Chosen:
        """Returns the choices of a response that went on from its first tokens, behind so many tokens of a prompt."""
        if prompt == len(self.prompt):
            return self
        return Chosen(self.prompt[:prompt], torch.cat([self.prompt[prompt:], self.response]))


@dataclass(frozen=True)
class Completion:
    """One response, or its part that was drawn before a pause. A stop token that was drawn, or the token that completed
    a stop string, is its last token."""

    row: int
    tokens: list[int]
    log_probs: list[float]  # of the tokens, under the distribution they were drawn from, before top-k, top-p and min-p
    stopped: bool  # by a stop token or a stop string; False: it reached its limit, or was interrupted
    experts: Chosen | None = None  # where the engine records them
    key: int = 0
    """Identity of the response in its session: that of its request."""
    finished: bool = True
    """False: a pause interrupted it; `Request.after` continues it."""


@dataclass(frozen=True)
class Request:
    """Responses that start from one prefill: the tokens that they continue, and the counters of their randomness.

    A token depends on (seed, step, row, position), so a response that is continued draws what it would have drawn.
    """

    tokens: list[int]
    """The prompt, and behind it what exists of the response."""
    keys: list[int]
    """Identity of each response, unique in its session. Rows are not: two sessions may ask for the same row."""
    rows: list[int]
    """Id of each response."""
    step: int
    """The training step that draws it."""
    limit: int
    """Most tokens that each response may still draw."""
    start: int = 0
    """Tokens that exist of the response: the position of the next one."""
    images: Images | None = None
    keep: bool = False
    """Park each response when it is finished: an engine that can keeps its keys and values, and a later request with
    the same key, whose tokens begin with all of the response, computes the others alone."""
    written: int = 0
    """Tokens at the end of `tokens` that were drawn before an interruption: stop strings and `Sampling.min_tokens` are
    of them and of what follows."""

    @property
    def work(self) -> int:
        """Returns the most tokens that are computed for it."""
        return len(self.tokens) + len(self.rows) * self.limit

    def after(self, part: Completion) -> Request:
        """Returns the request for the rest of a response that was interrupted."""
        return replace(
            self,
            tokens=self.tokens + part.tokens,
            keys=[part.key],
            rows=[part.row],
            limit=self.limit - len(part.tokens),
            start=self.start + len(part.tokens),
            written=self.written + len(part.tokens),
        )

    def minimum(self, sampling: Sampling) -> int:
        """Returns how many tokens each response must still draw before it may stop."""
        return max(0, sampling.min_tokens - self.written)

    def parts(self, most: int) -> list[Request]:
        """Splits it into requests of at most `most` responses; each computes the prompt anew."""
        cuts = range(0, len(self.rows), most)
        return [replace(self, keys=self.keys[i : i + most], rows=self.rows[i : i + most]) for i in cuts]


@dataclass(frozen=True)
class Limits:
    """The most that is in flight at a time in a session: buffers have room for it, whatever arrives in which order."""

    requests: list[tuple[int, int]]
    """Tokens and responses of each request."""
    whole: int | None = None
    """Most tokens of a prompt with its response; None: the longest request, and a whole response behind it."""
    behind: int | None = None
    """Most tokens of all turns behind those that a kept response began with; None: those of one response."""
    parts: bool = False
    """True if the session may be paused before its responses are finished, which then go on in another one."""

    @staticmethod
    def of(requests: Iterable[Request], parts: bool = False) -> Limits:
        return Limits([(len(request.tokens), len(request.rows)) for request in requests], parts=parts)


def joined(part: Completion, rest: Completion) -> Completion:
    """Returns a response of which `part` was drawn before an interruption, and `rest` after it."""
    tokens, log_probs = part.tokens + rest.tokens, part.log_probs + rest.log_probs
    experts = rest.experts and part.experts and rest.experts.behind(len(part.experts.prompt))
    return replace(rest, tokens=tokens, log_probs=log_probs, experts=experts)


OnDone = Callable[[list[Completion]], None]
"""Called with responses that are finished while others are not."""


class EngineConfig(Protocol):
    """The sections of a config that rollout engines read. `open_engine` of an engine's module is given all of it."""

    actor_rollout_ref: ActorRolloutRefConfig
    data: DataConfig
    trainer: TrainerConfig


@dataclass(frozen=True)
class Until:
    """Says when a session ends before all of its responses are finished."""

    keys: Collection[int]
    """Responses that must be finished."""
    others: Callable[[], bool] | None = None
    """Asked once they are: True if other engines have finished theirs, too. None: this engine is alone."""
    look: float | None = None
    """Seconds between two questions to `others`."""
    sooner: Callable[[], bool] | None = None
    """True if the session is to end although they are not: something else is to be asked for beside them."""

    def reached(self, finished: Collection[int]) -> bool:
        if self.sooner and self.sooner():
            return True
        return all(key in finished for key in self.keys) and (self.others is None or self.others())


@dataclass(frozen=True)
class Decoded:
    """Counts decode steps, the responses that were alive in each of them, and tokens that were computed again."""

    steps: int = 0
    rows: int = 0
    recomputed: int = 0
    """Tokens of responses that go on, with those of their prompts."""

    @staticmethod
    def side_by_side(counts: Iterable[Decoded | None]) -> Decoded | None:
        """Returns what engines that decode at the same time have decoded together; None if none counts it."""
        known = [count for count in counts if count is not None]
        if not known:
            return None
        steps, rows = max(count.steps for count in known), sum(count.rows for count in known)
        return Decoded(steps, rows, sum(count.recomputed for count in known))

    def since(self, before: Decoded) -> dict[str, float]:
        """Returns the decode steps since then, and how many responses were alive in a step, as metrics; if responses
        went on, also the tokens that were computed again."""
        steps = self.steps - before.steps
        alive = {"rollout/live_rows": (self.rows - before.rows) / steps} if steps else {}
        again = self.recomputed - before.recomputed
        return {"rollout/decode_steps": float(steps)} | alive | ({"rollout/recomputed_tokens": again} if again else {})


class RolloutEngine(Protocol):
    """An engine works in sessions: between `resume` and `pause` it answers requests, all under one `Sampling`, and the
    model's weights do not change."""

    @property
    def decoded(self) -> Decoded | None:
        """Returns what it has decoded so far; None: it does not count that."""
        return None

    def resume(self, sampling: Sampling, limits: Limits) -> None:
        """Opens a session with room for `limits`."""
        ...

    def submit(self, requests: Iterable[Request]) -> None:
        """Adds requests to those that wait; `advance` computes them."""
        ...

    def advance(self, seconds: float | None = None) -> list[Completion]:
        """Computes until a response is finished, or so many seconds have passed; returns those that are finished.

        Returns nothing if nothing is in flight. An engine may finish more than that before it returns.
        """
        ...

    def can_wait(self) -> bool:
        """True if nothing is lost while the host does something else before the next `advance`: the device still
        computes what was launched ahead, or computes nothing without the host."""
        return True

    def forget(self, keys: Iterable[int]) -> None:
        """Frees what is kept of these parked responses, if anything is: their conversations have ended."""
        return

    def pause(self) -> list[Completion]:
        """Ends the session; returns what was drawn of responses that are not finished, where the engine can tell.

        Requests without such a part begin again from their tokens when they are submitted to another session.
        """
        ...

    def abandon(self) -> None:
        """Ends the session after an error: nothing of it is left behind."""
        self.pause()

    def answer(
        self, requests: list[Request], sampling: Sampling, on_done: OnDone | None = None, until: Until | None = None
    ) -> list[Completion]:
        """Answers requests in a session of their own: all of them, or until those that `until` names are finished.

        Returns the responses that are finished, then what was drawn of others. `on_done` hears of those that are
        finished while more are to come.
        """
        if not requests:
            return []
        keys = {key for request in requests for key in request.keys}
        finished: dict[int, Completion] = {}
        self.resume(sampling, Limits.of(requests, parts=until is not None))
        try:
            self.submit(requests)
            while not (until and until.reached(finished)) and len(finished) < len(keys):
                done = self.advance(until.look if until else None)
                finished.update((completion.key, completion) for completion in done)
                if on_done is not None and done and len(finished) < len(keys):
                    on_done(done)
        except BaseException:
            self.abandon()
            raise
        return [*finished.values(), *self.pause()]

    def generate(self, prompts: list[Prompt], sampling: Sampling, on_done: OnDone | None = None) -> list[Completion]:
        """Answers all prompts in a session of their own; returns the responses in the order of the prompts and rows."""
        completions = self.answer(requests_of(prompts, sampling), sampling, on_done)
        return sorted(completions, key=lambda completion: completion.key)

    def sleep(self) -> None:
        """Frees device memory that is idle between sessions."""
        return

    def wake(self) -> None:
        """Makes the engine ready for a session after `sleep`."""
        return


def requests_of(prompts: Iterable[Prompt], sampling: Sampling) -> list[Request]:
    """Returns a request for each prompt; a response's key is its index among all of them."""
    requests: list[Request] = []
    key = 0
    for prompt in prompts:
        keys, limit = list(range(key, key + len(prompt.rows))), prompt.limit(sampling)
        requests.append(Request(prompt.tokens, keys, prompt.rows, sampling.step, limit, images=prompt.images))
        key += len(keys)
    return requests


@runtime_checkable
class CopyEngine(RolloutEngine, Protocol):
    """An engine with a copy of the weights: it takes the trainer's after each update, and may free them in sleep."""

    name: str  # as `rollout.name` has it
    dtype: torch.dtype
    stale: bool  # its weights are not the trainer's
    takes_adapter: bool = False
    """True: it reads frozen weights itself, and takes the LoRA adapter beside them in place of buckets."""

    def load_bucket(self, bucket: list[tuple[str, Tensor]], first: bool, last: bool) -> None:
        """Takes some of the new weights, under Hugging Face names; the buckets of all come one after the other."""
        ...

    def differing_layers(self) -> list[str]:
        """Matrices that are not what was sent, the most different first; where the engine can tell."""
        ...

    def load_adapter(self, folder: Path) -> None:
        """Loads an adapter that peft saved, if `takes_adapter`. The folder may be removed afterwards."""
        assert self.takes_adapter, "this engine takes merged weights"
