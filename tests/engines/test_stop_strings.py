"""Engines end responses at stop strings as cutting the unstopped responses would, whatever the batch and the pauses."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sessions import PROMPTS, SAMPLED, close, interrupted, whole
from stops import letter_tokenizer
from tiny_models import EOS, tiny_model

from paddock.engines.rollout.base import Completion, Sampling, requests_of
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.rollout.stops import StopTables

pytestmark = pytest.mark.usefixtures("cpu_way")
TOKENIZER = letter_tokenizer()
PLAIN = replace(SAMPLED, max_tokens=40)
STOPPED = replace(PLAIN, stop=("ab<", "\n>a", "b\u00e9"))


def engine_of(kind=EmbeddedEngine, **more):
    return kind(tiny_model(), stop_tables=StopTables(TOKENIZER), **more)


def first_end(tokens: list[int], sampling: Sampling) -> int | None:
    """Decodes after every token."""
    texts = (TOKENIZER.decode(tokens[:count], skip_special_tokens=False) for count in range(1, len(tokens) + 1))
    return next((count for count, text in enumerate(texts, 1) if any(one in text for one in sampling.stop)), None)


@pytest.mark.parametrize("kind", [EmbeddedEngine, HFEngine])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_responses_end_with_the_token_that_completes_a_string(kind, temperature):
    plain, stopped = replace(PLAIN, temperature=temperature), replace(STOPPED, temperature=temperature)
    expected = kind(tiny_model()).generate(PROMPTS, plain)
    found, ends = engine_of(kind).generate(PROMPTS, stopped), 0
    for own, other in zip(found, expected, strict=True):
        end = first_end(other.tokens, stopped)
        assert own.tokens == other.tokens[:end]
        close(own.log_probs, other.log_probs[:end])
        assert own.stopped == (end is not None or other.stopped)
        ends += end is not None
    assert ends >= 3 and len({len(one.tokens) for one in found}) > 2


def test_a_string_ends_the_same_responses_in_any_batch_and_after_any_pause():
    engine = engine_of(max_num_seqs=7)
    expected = {one.row: one.tokens for one in engine.generate(PROMPTS, STOPPED)}
    for slots, budget in ((1, 8192), (4, 10)):
        one = engine_of(max_num_seqs=slots, max_num_batched_tokens=budget)
        assert {c.row: c.tokens for c in one.generate(PROMPTS[::-1], STOPPED)} == expected
    chance = random.Random(1)
    for sampling in (STOPPED, replace(STOPPED, min_tokens=9)):
        assert interrupted(engine, requests_of(PROMPTS, sampling), sampling, chance) > 20


@pytest.mark.parametrize("kind", [EmbeddedEngine, HFEngine])
def test_a_string_may_begin_before_an_interruption_but_not_in_the_prompt(kind):
    engine = engine_of(kind)
    asked = (requests_of(PROMPTS, replace(STOPPED, step=step)) for step in range(99))
    request, ended = next(
        (request, one)
        for requests in asked
        for request in requests
        for one in whole(engine, [request], STOPPED)
        if one.stopped and one.tokens[-1] != EOS and not first_end(one.tokens[-1:], STOPPED)
    )
    before = len(ended.tokens) - 1
    part = replace(ended, tokens=ended.tokens[:before], log_probs=ended.log_probs[:before])
    rest = request.after(part)
    assert [one.tokens for one in whole(engine, [rest], STOPPED)] == [ended.tokens[before:]]
    begun = replace(rest, written=0)
    assert len(whole(engine, [begun], STOPPED)[0].tokens) > 1, "it goes on: the string would begin in the prompt"


@pytest.mark.parametrize("kind", [EmbeddedEngine, HFEngine])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("stop", [(), STOPPED.stop], ids=["tokens", "strings"])
def test_min_tokens_precede_a_stop_and_change_no_log_prob(kind, stop, temperature):
    """Stop tokens are a fifth of all here; log-probs are those of the whole distribution."""
    often = replace(PLAIN, temperature=temperature, stop_tokens=frozenset(range(0, 260, 5)), stop=stop)
    late = replace(often, min_tokens=11)
    early, found = engine_of(kind).generate(PROMPTS, often), engine_of(kind).generate(PROMPTS, late)
    for first, own in zip(early, found, strict=True):
        assert len(own.tokens) > 11 and not often.stop_tokens & {*own.tokens[:11]}
        if temperature == 0.0 and first.tokens[-1] in often.stop_tokens and len(first.tokens) <= 11:
            assert own.tokens[: len(first.tokens) - 1] == first.tokens[:-1]
    assert min(len(one.tokens) for one in early) < 8 and any(one.stopped for one in found)
    check_log_probs(found, late)


def check_log_probs(found: list[Completion], sampling: Sampling) -> None:
    model, prompts = tiny_model(), {row: prompt.tokens for prompt in PROMPTS for row in prompt.rows}
    for one in found:
        tokens = torch.tensor([prompts[one.row] + one.tokens])
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0, -len(one.tokens) - 1 : -1] / (sampling.temperature or 1.0)
        close(one.log_probs, logits.log_softmax(-1).gather(1, tokens[0, -len(one.tokens) :, None])[:, 0].tolist())


def test_embedded_equals_hf_with_strings_and_a_minimum():
    sampling = replace(STOPPED, min_tokens=6, top_p=0.95, stop_tokens=frozenset(range(0, 260, 9)))
    ours, plain = (engine_of(kind).generate(PROMPTS, sampling) for kind in (EmbeddedEngine, HFEngine))
    assert [(one.tokens, one.stopped) for one in ours] == [(one.tokens, one.stopped) for one in plain]


def test_ignored_stop_tokens_end_nothing_and_strings_still_do():
    sampling = replace(STOPPED, ignore_eos=True, min_tokens=3, stop_tokens=frozenset(range(0, 260, 5)))
    found = engine_of().generate(PROMPTS, sampling)
    assert any(one.stopped for one in found) and any({*one.tokens[:-1]} & sampling.stop_tokens for one in found)
