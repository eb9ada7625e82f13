"""Responses that are interrupted, or go on after another's words, are those of one session and of one forward."""

from __future__ import annotations

import gc
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sessions import PROMPTS, ROOM, SAMPLED, close, converse, interrupted, whole
from tiny_models import tiny_model
from tiny_zoo import DENSE, SPARSE, tiny

from paddock.core import garbage
from paddock.engines.rollout.base import Limits, Request, joined, requests_of
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.errors import UserError

DEFAULT = ("qwen3", "gemma2", "mistral", "deepseek_v3", "gpt_oss")
"""A plain one, capped scores, a window, latent attention with experts, and sinks; the others are slow tests."""


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


@pytest.mark.parametrize("end", [EmbeddedEngine.pause, EmbeddedEngine.abandon])
def test_garbage_is_sought_seldom_and_only_among_new_objects_while_a_session_lasts(end, monkeypatch):
    """A full collection of all that a run has loaded takes some tenths of a second, in which a GPU runs dry."""
    engine, thresholds = EmbeddedEngine(tiny_model()), gc.get_threshold()
    gc.unfreeze()  # what the tests took out of it for themselves
    monkeypatch.setattr(garbage, "frozen", threading.Event())
    try:
        engine.resume(SAMPLED, ROOM)
        assert gc.get_freeze_count() > 100_000
        assert gc.get_threshold() == (garbage.NEW_OBJECTS, *thresholds[1:])
        end(engine)
        assert gc.get_freeze_count() == 0 and gc.get_threshold() == thresholds
    finally:
        gc.freeze()


@pytest.mark.parametrize(("there", "freezes"), [(0, True), (375, True), (376, False)])
def test_a_session_leaves_alone_what_others_froze_but_not_what_python_itself_froze_at_its_start(
    there, freezes, monkeypatch
):
    """Python 3.12 begins with 375 such objects."""
    called = []
    stand_in = SimpleNamespace(get_freeze_count=lambda: there, freeze=lambda: called.append("freeze"),
                               collect=lambda: called.append("collect"),
                               unfreeze=lambda: called.append("unfreeze"), get_threshold=gc.get_threshold,
                               set_threshold=lambda *_: None)  # fmt: skip
    monkeypatch.setattr(garbage, "gc", stand_in)
    monkeypatch.setattr(garbage, "frozen", threading.Event())
    monkeypatch.setattr(garbage, "FROZEN_AT_START", 375)
    with garbage.collecting_new_objects():
        assert called == ["freeze"] * freezes
    assert called == ["freeze", "collect", "unfreeze"] * freezes


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
    model = tiny(family)
    engine = EmbeddedEngine(model, max_num_seqs=8, max_num_batched_tokens=40)
    computed: list[int] = []
    forward = engine.logits
    engine.logits = lambda tokens, *rest, **more: (computed.append(tokens.numel()), forward(tokens, *rest, **more))[1]
    conversations = converse(engine, turns=8)
    assert sum(computed) < 3 * sum(len(one.tokens) for one in conversations), "turns compute what is new"
    for one in conversations:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            logits = model(torch.tensor([one.tokens]), use_cache=False).logits[0].float() / SAMPLED.temperature
        places = sorted(one.log_probs)
        expected = logits.log_softmax(-1)[[at - 1 for at in places], [one.tokens[at] for at in places]]
        close([one.log_probs[at] for at in places], expected.tolist())


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
