"""What every engine with a copy of the weights must do: the tokens and log-probs of transformers, before and after new
weights, and a guard on both. vLLM itself, and SGLang's recorded protocol in front of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from copy_pairs import MODELS, PROMPTS, RECORDED, SAMPLED, Pair, worst_gap
from stops import letter_tokenizer
from tiny_models import EOS

from paddock.config.rollout_engines import engine_kind
from paddock.engines.rollout.base import Completion, Prompt, Request
from paddock.engines.rollout.copies import buckets, row_seeds
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.stops import StopTables
from paddock.errors import UserError

ENGINES = [
    pytest.param((engine, kind), marks=[pytest.mark.vllm] if engine == "vllm" else [], id=f"{engine}-{kind}")
    for engine in ("vllm", "sglang")
    for kind in MODELS
]


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: Any, tmp_path_factory: Any) -> Iterator[Pair]:
    engine, kind = request.param
    if engine == "vllm":
        pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RECORDED))
        pair = Pair(engine, kind, tmp_path_factory.mktemp(kind))
    pair.sync()
    yield pair
    if engine == "sglang":
        pair.engine.close()


def test_log_probs_are_those_of_transformers_before_and_after_new_weights(pair):
    before = pair.engine.generate(PROMPTS, SAMPLED)
    assert worst_gap(pair.model, before) < 1e-3
    pair.change()
    assert worst_gap(pair.model, before) > 0.1  # new weights matter
    assert pair.sync() < 1e-3
    for temperature in (1.0, 0.7):
        after = pair.engine.generate(PROMPTS, replace(SAMPLED, temperature=temperature))
        assert worst_gap(pair.model, after, temperature) < 1e-3


def test_greedy_answers_are_those_of_the_embedded_engine(pair):
    greedy = replace(SAMPLED, temperature=0.0)
    expected = EmbeddedEngine(pair.trainer.model, max_num_seqs=4, max_num_batched_tokens=64).generate(PROMPTS, greedy)
    found = pair.engine.generate(PROMPTS, greedy)
    assert [(one.row, one.tokens, one.stopped) for one in found] == [(e.row, e.tokens, e.stopped) for e in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-3, rtol=0)


def test_samples_of_a_prompt_differ_and_depend_neither_on_order_nor_on_company(pair):
    expected = {one.row: one.tokens for one in pair.engine.generate(PROMPTS, SAMPLED)}
    assert expected[0] != expected[1]
    assert {one.row: one.tokens for one in pair.engine.generate(PROMPTS[::-1], SAMPLED)} == expected
    assert pair.engine.generate([Prompt(PROMPTS[1].tokens, [3])], SAMPLED)[0].tokens == expected[3]
    assert {one.row: one.tokens for one in pair.engine.generate(PROMPTS, replace(SAMPLED, step=1))} != expected


def test_a_response_ends_with_its_stop_token_and_those_that_end_early_are_told_early(pair):
    free = pair.engine.generate(PROMPTS, replace(SAMPLED, ignore_eos=True))
    assert all(len(one.tokens) == 10 and not one.stopped for one in free)
    stops = frozenset({free[0].tokens[3], EOS})
    early: list[Completion] = []
    found = pair.engine.generate(PROMPTS, replace(SAMPLED, stop_tokens=stops), early.extend)
    for one, whole in zip(found, free, strict=True):
        end = next((place + 1 for place, token in enumerate(whole.tokens) if token in stops), None)
        assert (one.tokens, one.stopped) == (whole.tokens[:end], end is not None)
    assert 0 < len(early) < len(found) and all(one in found for one in early)
    assert pair.engine.name != "vllm" or found[0] in early  # a server may give a thread its turn late
    assert len(pair.engine.generate(PROMPTS, replace(SAMPLED, stop_tokens=stops, ignore_eos=True))[0].tokens) == 10


def test_a_stop_token_at_the_last_place_ends_the_response_all_the_same(pair):
    free = pair.engine.generate(PROMPTS[:1], replace(SAMPLED, ignore_eos=True, max_tokens=2))
    stops = frozenset({free[0].tokens[1]}) - {free[0].tokens[0]}
    found = pair.engine.generate(PROMPTS[:1], replace(SAMPLED, stop_tokens=stops, max_tokens=2))
    assert found[0].stopped == bool(stops) and found[0].tokens == free[0].tokens


@pytest.mark.parametrize("minimum", [0, 4])
def test_a_response_ends_with_the_token_that_completes_a_stop_string(pair, minimum, monkeypatch):
    if minimum and not engine_kind(pair.engine.name).min_tokens:
        pytest.skip("its log-probs would be those of what is left")
    tables = StopTables(letter_tokenizer())
    monkeypatch.setattr(pair.engine, "stop_tables", tables)
    free = replace(SAMPLED, stop_tokens=frozenset({EOS, *range(200, 230)}), min_tokens=minimum, max_tokens=24)
    stopped, ends = replace(free, stop=("ab<", "\n>", "b\u00e9")), 0
    prompts = [Prompt(prompt.tokens, [9 * i + j for j in range(6)]) for i, prompt in enumerate(PROMPTS)]
    for one, whole in zip(pair.engine.generate(prompts, stopped), pair.engine.generate(prompts, free), strict=True):
        table = tables.of(stopped.stop, torch.device("cpu"))
        _, end = table.read(whole.tokens, table.start, minimum)
        assert one.tokens == whole.tokens[:end] and one.stopped == (end is not None or whole.stopped)
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(whole.log_probs[:end]), atol=1e-4, rtol=0)
        assert not {*one.tokens[:minimum]} & free.stop_tokens and len(one.tokens) > minimum
        ends += end is not None
    assert ends > 2 and not pair.engine.waiting


def test_a_prompt_may_ask_for_shorter_responses(pair):
    whole = pair.engine.generate(PROMPTS, replace(SAMPLED, ignore_eos=True))
    short = [replace(PROMPTS[0], max_tokens=3), PROMPTS[1], replace(PROMPTS[2], max_tokens=99)]
    found = pair.engine.generate(short, replace(SAMPLED, ignore_eos=True))
    for one, long, limit in zip(found, whole, (3, 3, 10, 10, 10, 10), strict=True):
        assert one.tokens == long.tokens[:limit] and not one.stopped


def test_filters_cut_what_is_drawn(pair):
    only = pair.engine.generate(PROMPTS, replace(SAMPLED, top_k=1, temperature=1.0))
    greedy = pair.engine.generate(PROMPTS, replace(SAMPLED, temperature=0.0))
    assert [one.tokens for one in only] == [one.tokens for one in greedy]


def test_a_layer_that_is_not_sent_stops_the_run_by_name(pair, monkeypatch):
    old = {name: tensor.clone() for name, tensor in pair.trainer.weights()}
    pair.change()
    layer = "model.layers.1.mlp.down_proj.weight"
    lose(pair, monkeypatch, layer, old[layer])
    with pytest.raises(UserError, match=f"sent: {layer}\n") as refused:
        pair.sync()
    assert refused.value.value == pair.engine.name
    monkeypatch.undo()
    assert pair.sync() < 1e-3


def lose(pair: Pair, monkeypatch: Any, layer: str, old: torch.Tensor) -> None:
    """The layer that reaches the engine is an old one."""
    if pair.engine.name == "vllm":
        receive = pair.engine.llm.collective_rpc

        def received(method: str, args: Any = ()) -> Any:
            if method == "paddock_receive":
                args = ([(name, old if name == layer else tensor) for name, tensor in args[0]], *args[1:])
            return receive(method, args=args)

        monkeypatch.setattr(pair.engine.llm, "collective_rpc", received)
        return
    send = pair.engine.send
    monkeypatch.setattr(pair.engine, "send", lambda bucket: send([(n, old if n == layer else t) for n, t in bucket]))


def test_a_prompt_with_images_is_not_answered_without_them(pair):
    seen: Any = object()
    with pytest.raises(UserError, match="images") as refused:
        pair.engine.generate([replace(PROMPTS[0], images=seen)], SAMPLED)
    assert refused.value.value == pair.engine.name


def test_buckets_hold_all_weights_in_order_and_no_more_than_their_size():
    weights = [(str(i), torch.zeros(size)) for i, size in enumerate((10, 10, 30, 1, 1))]
    parts = list(buckets(weights, 80))
    assert [[name for name, _ in bucket] for bucket, _ in parts] == [["0", "1"], ["2"], ["3", "4"]]
    assert [last for _, last in parts] == [False, False, True]


def test_a_rows_seed_is_its_own():
    asked = Request([1], [0, 1, 2], [0, 1, 2], step=0, limit=4)
    seeds = row_seeds(asked, SAMPLED)
    assert row_seeds(replace(asked, rows=[2, 0]), SAMPLED) == [seeds[2], seeds[0]] and len(set(seeds)) == 3
    others = row_seeds(replace(asked, step=1), SAMPLED), row_seeds(asked, replace(SAMPLED, seed=2))
    assert all(other != seeds for other in (*others, row_seeds(replace(asked, start=1), SAMPLED)))
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert row_seeds(asked, replace(SAMPLED, temperature=0.0)) == [None] * 3
