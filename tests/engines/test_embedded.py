"""The embedded engine equals the plain one, whatever the batch, and leaves the actor's module as it found it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_models import EOS, FAMILIES, tiny_model
from torch import Tensor

from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.embedded import engine as engine_module
from paddock.engines.rollout.embedded import prepacked as prepacked_module
from paddock.engines.rollout.embedded.pool import SPARED, TokenPool, worth_sharing
from paddock.engines.rollout.embedded.slots import Slots
from paddock.engines.rollout.hf import HFEngine
from paddock.errors import UserError
from paddock.models.attention.slot_attention import spans_of

pytestmark = pytest.mark.usefixtures("cpu_way")
GREEDY = Sampling(max_tokens=12, stop_tokens=frozenset({EOS}), seed=5, step=2, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=0.8)
PROMPTS = [
    Prompt([40 + 3 * i + j for j in range(length)], [100 * i + j for j in range(3)])
    for i, length in enumerate((3, 9, 1, 17))
]


def tokens_of(completions: list[Completion]) -> dict[int, list[int]]:
    return {completion.row: completion.tokens for completion in completions}


def watch_buffers(monkeypatch, seen: Callable[[Tensor], object]) -> None:
    """Every buffer of keys or values that a layer asks for."""
    for kind in (Slots, TokenPool):

        def watched(self, *args, layer=kind.layer):
            found = layer(self, *args)
            for buffer in found:
                seen(buffer)
            return found

        monkeypatch.setattr(kind, "layer", watched)


def plain_log_probs(model, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """By one full forward with transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("family", "sampling"),
    [*((family, SAMPLED) for family in FAMILIES), ("qwen2", GREEDY),
     ("qwen2", replace(SAMPLED, top_k=20, top_p=0.9, min_p=0.01))],
)  # fmt: skip
def test_embedded_equals_hf_token_for_token(family, sampling):
    model = tiny_model(family)
    found = EmbeddedEngine(model).generate(PROMPTS, sampling)
    expected = HFEngine(model).generate(PROMPTS, sampling)
    assert [c.row for c in found] == [row for prompt in PROMPTS for row in prompt.rows]
    assert tokens_of(found) == tokens_of(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.stopped == theirs.stopped
        torch.testing.assert_close(torch.tensor(ours.log_probs), torch.tensor(theirs.log_probs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_spare_tokens_and_free_slots_change_no_answer(family, monkeypatch):
    """What bf16 on a CPU computes beside the live sequences, here in float32, where it must not show."""
    model = tiny_model(family)
    expected = EmbeddedEngine(model, max_num_seqs=7).generate(PROMPTS, SAMPLED)
    monkeypatch.setattr(engine_module, "spare", lambda tokens, *_: -tokens % 4)
    found = EmbeddedEngine(model, max_num_seqs=7).generate(PROMPTS, SAMPLED)
    assert tokens_of(found) == tokens_of(expected)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours.log_probs), torch.tensor(plain.log_probs), atol=1e-5, rtol=0)


def test_bf16_on_a_cpu_steps_over_few_numbers_of_rows(monkeypatch):
    stepped: list[int] = []
    step = EmbeddedEngine.step
    monkeypatch.setattr(EmbeddedEngine, "step", lambda *args: (stepped.append(args[2]), step(*args)))
    model = tiny_model("qwen2").to(torch.bfloat16)
    stops = replace(SAMPLED, stop_tokens=frozenset(range(0, 90, 4)), max_tokens=20)
    prompts = [Prompt(prompt.tokens, list(range(i * 20, i * 20 + 20))) for i, prompt in enumerate(PROMPTS)]
    found = EmbeddedEngine(model, max_num_seqs=50).generate(prompts, stops)
    assert len({len(completion.tokens) for completion in found}) > 4, "they should end at different times"
    assert set(stepped) <= {16, 32, 48, 50}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_plain_full_forward_within_1e_5(family):
    model = tiny_model(family)
    found = iter(EmbeddedEngine(model, max_num_seqs=5).generate(PROMPTS, SAMPLED))
    for prompt in PROMPTS:
        for completion in (next(found) for _ in prompt.rows):
            expected = plain_log_probs(model, prompt.tokens, completion.tokens, SAMPLED.temperature)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_answers_depend_neither_on_slots_nor_budget_nor_order_nor_company(family):
    model = tiny_model(family)
    expected = tokens_of(EmbeddedEngine(model).generate(PROMPTS, SAMPLED))
    for slots, budget in ((1, 8192), (4, 8192), (7, 10), (100, 1)):
        engine = EmbeddedEngine(model, max_num_seqs=slots, max_num_batched_tokens=budget)
        assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == expected
    assert tokens_of(EmbeddedEngine(model).generate(PROMPTS[::-1], SAMPLED)) == expected
    alone = EmbeddedEngine(model).generate([Prompt(PROMPTS[1].tokens, [102])], SAMPLED)
    assert alone[0].tokens == expected[102]


def test_answers_come_in_the_order_of_prompts_and_rows_though_lengths_differ():
    model, short = tiny_model(), replace(SAMPLED, stop_tokens=frozenset(range(60)))
    prompts = [Prompt(prompt.tokens, [7 - row for row in prompt.rows]) for prompt in PROMPTS]
    found = EmbeddedEngine(model, max_num_seqs=4).generate(prompts, short)
    assert [c.row for c in found] == [row for prompt in prompts for row in prompt.rows]
    assert len({len(c.tokens) for c in found}) > 1


def test_a_prompt_is_computed_once_for_all_its_responses():
    model = tiny_model()
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    EmbeddedEngine(model).generate([Prompt([5, 6, 7, 8, 9], list(range(6))), Prompt([9, 8], [6])],
                                   replace(SAMPLED, max_tokens=4, ignore_eos=True))  # fmt: skip
    assert seen == [5 + 2, 7, 7, 7]


def test_finished_responses_leave_and_are_computed_no_further():
    model = tiny_model()
    options = replace(SAMPLED, stop_tokens=frozenset(range(60)), max_tokens=30)
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    found = EmbeddedEngine(model).generate(PROMPTS, options)
    assert sum(seen) == sum(len(p.tokens) for p in PROMPTS) + sum(len(c.tokens) - 1 for c in found)


@pytest.mark.parametrize("engine", [EmbeddedEngine, HFEngine])
def test_a_prompt_may_ask_for_shorter_responses(engine):
    model, options = tiny_model(), replace(SAMPLED, stop_tokens=frozenset(range(20)))
    whole = HFEngine(model).generate(PROMPTS, options)
    limits = [1, 5, None, 99]
    short = [replace(prompt, max_tokens=limit) for prompt, limit in zip(PROMPTS, limits, strict=True)]
    found = engine(model, max_num_seqs=5).generate(short, options)
    for one, long, place in zip(found, whole, range(12), strict=True):
        assert one.tokens == long.tokens[: limits[place // 3]]
        assert one.stopped == (long.stopped and len(one.tokens) == len(long.tokens))
    assert any(one.stopped for one in found) and any(len(one.tokens) == 5 for one in found)


def test_several_steps_between_boundaries_change_no_answer():
    class Strided(EmbeddedEngine):
        def decode(self, sequences):
            for _ in range(5):
                super().decode(sequences)

    model, options = tiny_model("mistral"), replace(SAMPLED, stop_tokens=frozenset(range(60)), max_tokens=16)
    expected = EmbeddedEngine(model).generate(PROMPTS, options)
    assert len({len(completion.tokens) for completion in expected}) > 3
    for found, plain in zip(Strided(model, max_num_seqs=7).generate(PROMPTS, options), expected, strict=True):
        assert (found.row, found.tokens, found.stopped) == (plain.row, plain.tokens, plain.stopped)
        torch.testing.assert_close(found.log_probs, plain.log_probs, atol=1e-5, rtol=0)


def test_an_error_leaves_nothing_in_the_buffers():
    model = tiny_model()
    engine = EmbeddedEngine(model)
    expected = engine.generate(PROMPTS, SAMPLED)
    projection = model.model.layers[0].self_attn.v_proj.weight.data
    weights = projection.clone()
    projection.fill_(float("nan"))
    with pytest.raises(UserError):
        engine.generate(PROMPTS, replace(SAMPLED, max_tokens=16))
    projection.copy_(weights)
    assert engine.generate(PROMPTS, SAMPLED) == expected


def test_a_response_ends_with_its_first_stop_token_or_at_max_tokens():
    model = tiny_model()
    free = EmbeddedEngine(model).generate(PROMPTS, replace(SAMPLED, ignore_eos=True))
    assert all(len(c.tokens) == len(c.log_probs) == 12 and not c.stopped for c in free)
    stops = frozenset({free[0].tokens[4], free[5].tokens[0], free[7].tokens[11]})
    for whole, cut in zip(
        free, EmbeddedEngine(model).generate(PROMPTS, replace(SAMPLED, stop_tokens=stops)), strict=True
    ):
        places = [i for i, token in enumerate(whole.tokens) if token in stops]
        end = places[0] + 1 if places else 12
        assert cut.tokens == whole.tokens[:end]
        torch.testing.assert_close(cut.log_probs, whole.log_probs[:end], atol=1e-5, rtol=0)
        assert cut.stopped == bool(places)
    one = EmbeddedEngine(model).generate(PROMPTS, replace(SAMPLED, max_tokens=1, ignore_eos=True))
    assert [c.tokens for c in one] == [c.tokens[:1] for c in free]


def test_weights_updated_in_place_are_used_at_once():
    model = tiny_model()
    engine = EmbeddedEngine(model)
    before = engine.generate(PROMPTS, GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    after = engine.generate(PROMPTS, GREEDY)
    assert tokens_of(before) != tokens_of(after)
    assert after == EmbeddedEngine(model).generate(PROMPTS, GREEDY)


def test_on_a_cpu_keys_and_values_are_gone_after_a_call_and_the_next_one_works(monkeypatch):
    buffers: list[weakref.ref[Tensor]] = []
    watch_buffers(monkeypatch, lambda buffer: buffers.append(weakref.ref(buffer)))
    engine = EmbeddedEngine(tiny_model())
    first = engine.generate(PROMPTS, SAMPLED)
    gc.collect()
    assert buffers and all(ref() is None for ref in buffers)
    engine.sleep()
    engine.wake()
    assert engine.generate(PROMPTS, SAMPLED) == first


def test_finished_responses_are_told_of_while_others_are_not_finished():
    told: list[Completion] = []
    found = EmbeddedEngine(tiny_model(), max_num_seqs=4).generate(PROMPTS, SAMPLED, told.extend)
    assert 0 < len(told) < len(found)
    assert all(completion in found for completion in told)


@pytest.mark.parametrize("engine_type", [EmbeddedEngine, HFEngine])
def test_the_module_is_left_as_it_was_even_after_an_error(engine_type):
    model = tiny_model(attention_dropout=0.5)
    model.gradient_checkpointing_enable()
    model.train()
    model.model.layers[0].mlp.eval()

    def state():
        flags = {name: module.training for name, module in model.named_modules()}
        hooks = {
            name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
        }
        owned = {name: set(vars(module)) for name, module in model.named_modules()}
        grads = [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
        return flags, hooks, owned, grads, model.config._attn_implementation

    before = state()
    found = engine_type(model).generate(PROMPTS, SAMPLED)
    assert state() == before
    assert tokens_of(found) == tokens_of(engine_type(tiny_model()).generate(PROMPTS, SAMPLED))
    with pytest.raises(IndexError):
        engine_type(model).generate([Prompt([10**6], [0])], SAMPLED)
    assert state() == before
    loss = model(torch.tensor([PROMPTS[3].tokens]), labels=torch.tensor([PROMPTS[3].tokens])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bf16_log_probs_follow_a_bf16_forward(monkeypatch):
    model = tiny_model().to(torch.bfloat16)
    stored = set()
    watch_buffers(monkeypatch, lambda buffer: stored.add(buffer.dtype))
    engine = EmbeddedEngine(model, max_num_seqs=7)
    found = engine.generate(PROMPTS, SAMPLED)
    assert stored == {torch.bfloat16}
    for i, prompt in enumerate(PROMPTS):
        for completion in found[3 * i : 3 * i + 3]:
            expected = plain_log_probs(model, prompt.tokens, completion.tokens, SAMPLED.temperature)
            assert (torch.tensor(completion.log_probs) - expected).abs().mean() < 0.05


def test_weights_put_in_order_beforehand_give_the_same_bits(monkeypatch):
    model = tiny_model("qwen2", tie_word_embeddings=False).to(torch.bfloat16)
    expected = EmbeddedEngine(model).generate(PROMPTS, SAMPLED)
    before = [set(vars(module)) for module in model.modules()]
    monkeypatch.setattr(prepacked_module, "PAYS_FROM", 1)
    monkeypatch.setattr(engine_module, "PACK_FROM", 1)
    with prepacked_module.prepacked(model, 12):
        packed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(packed) == (15 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 0)
    assert EmbeddedEngine(model).generate(PROMPTS, SAMPLED) == expected
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("engine_type", [EmbeddedEngine, HFEngine])
def test_diverged_weights_are_reported_instead_of_sampled(engine_type):
    model = tiny_model()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        engine_type(model).generate(PROMPTS, SAMPLED)


def test_a_prompt_that_cannot_fit_names_the_key():
    with pytest.raises(UserError, match=r"max_model_len=20.*17 tokens"):
        EmbeddedEngine(tiny_model(), max_model_len=20).generate(PROMPTS, SAMPLED)
    assert EmbeddedEngine(tiny_model(), max_model_len=29).generate(PROMPTS, SAMPLED)


def test_no_prompts_give_no_answers():
    assert EmbeddedEngine(tiny_model()).generate([], SAMPLED) == []


def test_slots_of_like_length_are_read_together_and_of_unlike_length_apart():
    assert len(spans_of([50] * 256)) == 1
    lengths = [2000] * 64 + [100] * 64
    first, second = spans_of(lengths)
    assert (first.start, first.stop, first.longest) == (0, 64, 2000)
    assert (second.start, second.stop, second.longest) == (64, 128, 100)


def test_ragged_lengths_read_in_several_spans_give_the_same_answers():
    model = tiny_model("mistral")
    prompts = [
        Prompt(list(range(10, 10 + length)), [8 * i + j for j in range(8)]) for i, length in enumerate((5, 240, 3))
    ]
    assert len(spans_of([240] * 8 + [5] * 8 + [3] * 8)) == 2
    found = EmbeddedEngine(model).generate(prompts, GREEDY)
    assert tokens_of(found) == tokens_of(HFEngine(model).generate(prompts, GREEDY))


@pytest.mark.parametrize(
    "requests,at_once,numbers,shared",
    [
        ([(512, 8)] * 128, 1024, 256, True),
        ([(120, 8)] * 128, 1024, 512, False),  # slower on a GPU, as measured
        ([(120, 8)] * 128, 1024, 2048, True),  # eight heads of keys, not two
        ([(2048, 1)] * 1024, 1024, 256, False),  # nobody to read with
        ([(2048, 8)] * 32, 256, 256, True),
        ([(2048, 8)] * 32, 64, 256, False),  # few at a time
        ([(SPARED // 256, 2)], 2, 256, True),
        ([(SPARED // 256 - 1, 2)], 2, 256, False),
        ([(2048, 8), *[(2048, 1)] * 300], 308, 256, False),  # what counts is all that is read
    ],
)
def test_prompts_are_read_together_where_that_spares_responses_enough(requests, at_once, numbers, shared):
    assert worth_sharing(requests, at_once, numbers) is shared


def test_a_cpu_answers_groups_that_a_gpu_would_read_together(monkeypatch):
    monkeypatch.setattr("paddock.engines.rollout.embedded.pool.SPARED", 0)
    model, group, short = (
        tiny_model("qwen2"),
        [Prompt(list(range(5, 205)), list(range(8)))],
        replace(SAMPLED, max_tokens=3),
    )
    assert tokens_of(EmbeddedEngine(model).generate(group, short)) == tokens_of(HFEngine(model).generate(group, short))
