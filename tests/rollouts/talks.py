"""Conversations of the built-in models with environments of a test, over real engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from paddock.data.dataset import PromptDataset, PromptRow
from paddock.engines.rollout.base import RolloutEngine, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.rollout.stops import StopTables
from paddock.loading.load import load
from paddock.models.load import load_causal_lm, load_tokenizer
from paddock.rollouts.conversation import Conversation
from paddock.rollouts.environments import Environments, RowEnvironments
from paddock.rollouts.episode import Episode, begun

EOS = 1
ENGINES: dict[str, Callable[..., RolloutEngine]] = {"embedded": EmbeddedEngine, "hf": HFEngine}


@cache
def model(name: str = "tiny") -> Any:
    return load_causal_lm(f"builtin:{name}", dtype=torch.float32, device=torch.device("cpu"))


@cache
def tokenizer() -> Any:
    return load_tokenizer("builtin:tiny")


def opened(environment: Any, *settings: str) -> Environments:
    """Returns the environments of a run in this class, under these keys."""
    name = environment if isinstance(environment, str) else "python:own"
    config = load([f"environment={name}", "data.max_prompt_length=32", *settings]).config
    return Environments(config, tokenizer(), frozenset({EOS}), RowEnvironments(config, {"own": environment}))


def rows(count: int, data: str = "builtin:addition/test") -> list[PromptRow]:
    config = load([f"data.train_files={data}", "trainer.device=cpu"]).config
    return PromptDataset.train(config.data, tokenizer()).rows(range(count))


def sampling(length: int = 32, **changes: Any) -> Sampling:
    return Sampling(**{"max_tokens": length, "stop_tokens": frozenset({EOS}), "seed": 3, "step": 1, **changes})


def talk(
    environment: Any, *settings: str, count: int = 4, samples: int = 2, length: int = 32, engine: str = "embedded",
    slots: int = 256, data: str = "builtin:addition/test", weights: str = "tiny", **changes: Any,
) -> list[Episode]:  # fmt: skip
    """Returns the episodes of `count` rows, `samples` each."""
    environments = opened(environment, f"actor_rollout_ref.rollout.max_num_seqs={slots}", *settings)
    own = ENGINES[engine](model(weights), max_num_seqs=slots, stop_tables=StopTables(tokenizer()))
    try:
        drawn = sampling(length, **changes)
        return environments.run(own, 7, begun(rows(count, data), samples, drawn.step), drawn)
    finally:
        environments.close()


def conversation(environment: Any, *settings: str, length: int = 32) -> Conversation:
    """Returns a conversation that has been asked, to drive by hand."""
    environments = opened(environment, *settings)
    (row,) = rows(1)
    found = Conversation(row, 0, environments.rows.factory(None, None), environments.setting, sampling(length), 7)
    made = found.factory.make()
    found.tools = {tool.name: tool for tool in made.tools()}
    found.asked = row.messages
    return found


def driven(generator: Any) -> Any:
    """Runs a generator of Futures to its end; returns what it returns."""
    try:
        wanted = next(generator)
        while True:
            try:
                found = wanted.result(timeout=10)
            except Exception as error:
                wanted = generator.throw(error)
            else:
                wanted = generator.send(found)
    except StopIteration as end:
        return end.value


def texts(episodes: Sequence[Episode]) -> list[list[str]]:
    return [[tokenizer().decode(span.tokens) for span in one.spans] for one in episodes]
