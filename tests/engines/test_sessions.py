"""Responses that are interrupted, or go on after another's words, are those of one session and of one forward."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tiny_models import EOS, tiny_model
from tiny_zoo import DENSE, SPARSE, tiny

from paddock.engines.rollout.base import Completion, Limits, Prompt, Request, Sampling, joined, requests_of
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.errors import UserError

SAMPLED = Sampling(max_tokens=24, stop_tokens=frozenset({EOS}), seed=5, step=2, temperature=0.8)
PROMPTS = [
    Prompt([40 + 3 * i + j for j in range(length)], [100 * i + j for j in range(3)])
    for i, length in enumerate((3, 9, 1, 17))
]
DEFAULT = ("qwen3", "gemma2", "mistral", "deepseek_v3", "gpt_oss")
"""A plain one, capped scores, a window, latent attention with experts, and sinks; the others are slow tests."""
ROOM = Limits([(64, 1)] * 12)


def interrupted(engine: EmbeddedEngine, requests: list[Request], sampling: Sampling, chance: random.Random) -> int:
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
        close(parts[key].log_probs, expected.log_probs)
    return interruptions


def whole(engine: EmbeddedEngine | HFEngine, requests: list[Request], sampling: Sampling) -> list[Completion]:
    engine.resume(sampling, Limits.of(requests))
    engine.submit(requests)
    found: list[Completion] = []
    while done := engine.advance():
        found += done
    assert engine.pause() == []
    return found


def close(ours: list[float], theirs: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=2e-5, rtol=0)


@pytest.mark.usefixtures("cpu_way")
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_interrupted_responses_draw_what_they_would_have_drawn(family):
    engine, chance = EmbeddedEngine(tiny_model(family), max_num_seqs=7), random.Random(1)
    assert interrupted(engine, requests_of(PROMPTS, SAMPLED), SAMPLED, chance) > 20


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_way")
def test_a_thousand_interruptions_change_no_token():
    engine, chance, interruptions = EmbeddedEngine(tiny_model("qwen2"), max_num_seqs=7), random.Random(2), 0
    while interruptions < 1000:
        sampling = replace(SAMPLED, step=interruptions)
        interruptions += interrupted(engine, requests_of(PROMPTS, sampling), sampling, chance)


@pytest.mark.parametrize("kind", [EmbeddedEngine, HFEngine])
def test_a_response_goes_on_from_any_of_its_tokens(kind):
    engine, (request, *_) = kind(tiny_model()), requests_of(PROMPTS[1:], replace(SAMPLED, stop_tokens=frozenset()))
    sampling = replace(SAMPLED, stop_tokens=frozenset())
    expected = {one.key: one for one in whole(engine, [request], sampling)}
    for start in (1, 7, 23):
        cut = [replace(one, tokens=one.tokens[:start], log_probs=one.log_probs[:start]) for one in expected.values()]
        rest = {one.key: one for one in whole(engine, [request.after(part) for part in cut], sampling)}
        for part in cut:
            both = joined(part, rest[part.key])
            assert both.tokens == expected[part.key].tokens
            close(both.log_probs, expected[part.key].log_probs)


@pytest.mark.parametrize("kind", [EmbeddedEngine, HFEngine])
def test_a_response_is_known_by_its_key_not_by_its_row(kind):
    asked = [Request([50, 51], [7], [3], 2, 6), Request([50, 51], [8], [3], 9, 6), Request([60], [9], [3], 2, 6)]
    found = {one.key: one for one in whole(kind(tiny_model()), asked, SAMPLED)}
    assert sorted(found) == [7, 8, 9] and {one.row for one in found.values()} == {3}
    alone = [whole(kind(tiny_model()), [request], SAMPLED)[0].tokens for request in asked]
    assert [found[key].tokens for key in (7, 8, 9)] == alone and alone[0] != alone[1]


@pytest.mark.usefixtures("cpu_way")
@pytest.mark.parametrize("family", [
    family if family in DEFAULT else pytest.param(family, marks=pytest.mark.slow) for family in (*DENSE, *SPARSE)
])  # fmt: skip
def test_a_conversation_of_eight_turns_is_that_of_one_forward(family):
    model, chance = tiny(family), random.Random(3)
    engine, turns = EmbeddedEngine(model, max_num_seqs=8, max_num_batched_tokens=40), 8
    sampling = replace(SAMPLED, max_tokens=96, stop_tokens=frozenset(range(40, 60)))
    said = {key: [30 + key] * (key + 1) for key in range(5)}  # all tokens so far
    prompts, log_probs = {key: len(tokens) for key, tokens in said.items()}, {key: {} for key in said}
    engine.resume(sampling, ROOM)
    computed: list[int] = []
    forward = engine.logits
    engine.logits = lambda tokens, *rest, **more: (computed.append(tokens.numel()), forward(tokens, *rest, **more))[1]
    engine.submit([Request(said[key], [key], [key], 2, 8, keep=True) for key in said])
    taken = dict.fromkeys(said, 0)
    while any(count < turns for count in taken.values()):
        for one in engine.advance():
            at = len(said[one.key])
            log_probs[one.key] |= {at + i: value for i, value in enumerate(one.log_probs)}
            said[one.key] += one.tokens
            taken[one.key] += 1
            if taken[one.key] == turns:
                engine.forget([one.key])
                continue
            said[one.key] += [chance.randint(60, 90) for _ in range(chance.randint(1, 4))]
            start = len(said[one.key]) - prompts[one.key]
            engine.submit([Request(list(said[one.key]), [one.key], [one.key], 2, 8, start, keep=True)])
    assert engine.session.holding == 0 and engine.pause() == []
    assert sum(computed) < 3 * sum(map(len, said.values())), "turns compute what is new"
    for key, tokens in said.items():
        model.set_attn_implementation("eager")
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float() / sampling.temperature
        places = sorted(log_probs[key])
        expected = logits.log_softmax(-1)[[at - 1 for at in places], [tokens[at] for at in places]]
        close([log_probs[key][at] for at in places], expected.tolist())


def test_turns_draw_what_a_request_for_the_whole_conversation_draws():
    model = tiny_model()
    engine, plain = EmbeddedEngine(model), HFEngine(model)
    engine.resume(SAMPLED, ROOM)
    engine.submit([Request([50, 51, 52], [0], [4], 2, 6, keep=True)])
    (first,) = engine.advance()
    more = Request([50, 51, 52, *first.tokens, 70, 71], [0], [4], 2, 6, len(first.tokens) + 2)
    engine.submit([more])
    (second,) = engine.advance()
    engine.pause()
    (expected,) = whole(plain, [more], SAMPLED)
    assert second.tokens == expected.tokens
    close(second.log_probs, expected.log_probs)


def test_parked_responses_keep_their_room_until_they_are_forgotten():
    engine = EmbeddedEngine(tiny_model(), max_num_seqs=2)
    engine.resume(SAMPLED, Limits([(8, 1)] * 4))
    engine.submit([Request([50 + key], [key], [key], 2, 4, keep=True) for key in range(4)])
    found = [one.key for _ in range(9) for one in engine.advance()]
    assert len(found) == 2 and engine.advance() == [], "two of four: parked ones hold the room"
    engine.forget(found)
    more = [one.key for _ in range(9) for one in engine.advance()]
    assert sorted(found + more) == [0, 1, 2, 3]
    engine.pause()


def test_a_session_ends_with_an_error_and_the_next_one_works(monkeypatch):
    engine = EmbeddedEngine(tiny_model())
    expected = engine.generate(PROMPTS, SAMPLED)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(engine, "decode", lambda *_: 1 / 0)
        engine.generate(PROMPTS, SAMPLED)
    assert engine.generate(PROMPTS, SAMPLED) == expected


def test_conversations_whose_experts_are_recorded_are_refused_by_name():
    engine = EmbeddedEngine(tiny("qwen3_moe"), record_experts=True)
    engine.resume(SAMPLED, ROOM)
    with pytest.raises(UserError, match="one turn") as error:
        engine.submit([Request([50], [0], [0], 2, 4, keep=True)])
    assert error.value.key == "actor_rollout_ref.rollout.enable_rollout_routing_replay"
