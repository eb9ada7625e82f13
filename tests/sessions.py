"""Sessions of a rollout engine as tests drive them: paused at random, and conversations of many turns."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch
from tiny_models import EOS

from paddock.engines.rollout.base import Completion, Limits, Prompt, Request, RolloutEngine, Sampling, joined

SAMPLED = Sampling(max_tokens=24, stop_tokens=frozenset({EOS}), seed=5, step=2, temperature=0.8)
PROMPTS = [
    Prompt([40 + 3 * i + j for j in range(length)], [100 * i + j for j in range(3)])
    for i, length in enumerate((3, 9, 1, 17))
]
ROOM = Limits([(64, 1)] * 12)


def interrupted(
    engine: RolloutEngine, requests: list[Request], sampling: Sampling, chance: random.Random, atol: float = 2e-5
) -> int:
    """Answers requests in sessions that are paused after a few steps each; returns the number of interruptions."""
    plain = {completion.key: completion for completion in whole(engine, requests, sampling)}
    open_requests, parts, interruptions = list(requests), dict[int, Completion](), 0
    while open_requests:
        engine.resume(sampling, Limits.of(open_requests))
        engine.submit(open_requests)
        found: list[Completion] = []
        for _ in range(chance.randint(1, 6)):
            found += engine.advance(seconds=0.0)
        found += engine.pause()
        asked = {key: request for request in open_requests for key in request.keys}
        open_requests = [replace(request, keys=[key], rows=[request.rows[request.keys.index(key)]])
                         for key, request in asked.items() if key not in {one.key for one in found}]  # fmt: skip
        for one in found:
            parts[one.key] = joined(parts[one.key], one) if one.key in parts else one
            if not one.finished:
                interruptions += 1
                open_requests.append(asked[one.key].after(one))
    for key, expected in plain.items():
        assert parts[key].tokens == expected.tokens and parts[key].stopped == expected.stopped
        close(parts[key].log_probs, expected.log_probs, atol)
    return interruptions


def whole(engine: RolloutEngine, requests: list[Request], sampling: Sampling) -> list[Completion]:
    engine.resume(sampling, Limits.of(requests))
    engine.submit(requests)
    found: list[Completion] = []
    while done := engine.advance():
        found += done
    assert engine.pause() == []
    return found


def close(ours: list[float], theirs: list[float], atol: float = 2e-5) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=atol, rtol=0)


@dataclass
class Conversation:
    tokens: list[int]
    prompt: int
    """Tokens of the prompt."""
    log_probs: dict[int, float] = field(default_factory=dict)
    """Of each token that the policy drew, by its index."""
    turns: int = 0


def converse(engine: RolloutEngine, turns: int, sampling: Sampling = SAMPLED) -> list[Conversation]:
    """Holds five conversations through parked responses; an environment says one to four tokens after each turn."""
    chance = random.Random(3)
    sampling = replace(sampling, max_tokens=96, stop_tokens=frozenset(range(40, 60)))
    held = [Conversation([30 + key] * (key + 1), key + 1) for key in range(5)]
    engine.resume(sampling, ROOM)
    engine.submit([Request(list(one.tokens), [key], [key], 2, 8, keep=True) for key, one in enumerate(held)])
    while any(one.turns < turns for one in held):
        for answer in engine.advance():
            one, key = held[answer.key], answer.key
            one.log_probs |= {len(one.tokens) + i: value for i, value in enumerate(answer.log_probs)}
            one.tokens += answer.tokens
            one.turns += 1
            if one.turns == turns:
                engine.forget([key])
                continue
            one.tokens += [chance.randint(60, 90) for _ in range(chance.randint(1, 4))]
            start = len(one.tokens) - one.prompt
            engine.submit([Request(list(one.tokens), [key], [key], 2, 8, start, keep=True)])
    assert engine.pause() == []
    return held
