"""What a rollout engine does: tokens in, tokens and their log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paddock.core.images import Images


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


@dataclass(frozen=True, eq=False)
class Chosen:
    """The experts that tokens went to, ``[tokens, layers, k]`` each."""

    prompt: Tensor
    response: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chosen):
            return NotImplemented
        return torch.equal(self.prompt, other.prompt) and torch.equal(self.response, other.response)


@dataclass(frozen=True)
class Completion:
    """One response: the stop token, where one was drawn, is its last token."""

    row: int
    tokens: list[int]
    log_probs: list[float]  # of the tokens, under the distribution they were drawn from, before top-k, top-p and min-p
    stopped: bool  # by a stop token; False: it reached its limit
    experts: Chosen | None = None  # where the engine records them


OnDone = Callable[[list[Completion]], None]
"""Called with responses that are finished while others are not."""


class RolloutEngine(Protocol):
    def generate(self, prompts: list[Prompt], sampling: Sampling, on_done: OnDone | None = None) -> list[Completion]:
        """Returns all responses of all prompts, in the order of the prompts and of their rows."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


@runtime_checkable
class CopyEngine(RolloutEngine, Protocol):
    """An engine with a copy of the weights: it takes the trainer's after each update, and may free them in sleep."""

    name: str  # as `rollout.name` has it
    dtype: torch.dtype
    stale: bool  # its weights are not the trainer's

    def load_bucket(self, bucket: list[tuple[str, Tensor]], first: bool, last: bool) -> None:
        """A part of what `load_weights` takes; all parts come one after the other."""
        ...

    def differing_layers(self) -> list[str]:
        """Matrices that are not what was sent, the most different first; where the engine can tell."""
        ...


@runtime_checkable
class AdapterEngine(CopyEngine, Protocol):
    """An engine that can take a LoRA adapter beside weights that it reads itself."""

    takes_adapter: bool  # it was opened for that

    def load_adapter(self, folder: Path) -> None:
        """Loads an adapter that peft saved. The folder may be removed afterwards."""
        ...
