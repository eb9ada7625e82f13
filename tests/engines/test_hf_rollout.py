"""The plain engine equals transformers' own generate() in greedy, and reports true log-probs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import EOS, PAD, tiny_model

from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.hf import HFEngine

GREEDY = Sampling(max_tokens=10, stop_tokens=frozenset({EOS}), seed=1, step=0, temperature=0.0)
PROMPTS = [Prompt([30 + i + j for j in range(length)], [2 * i, 2 * i + 1]) for i, length in enumerate((4, 11, 2))]


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3"])
def test_greedy_answers_are_those_of_transformers_generate(family):
    model = tiny_model(family)
    for prompt, found in zip(PROMPTS, HFEngine(model, max_num_seqs=4).generate(PROMPTS, GREEDY)[::2], strict=True):
        expected = model.generate(
            torch.tensor([prompt.tokens]), max_new_tokens=10, do_sample=False, eos_token_id=EOS, pad_token_id=PAD
        )
        assert found.tokens == expected[0, len(prompt.tokens) :].tolist()


def test_log_probs_are_those_of_a_full_forward_without_padding():
    model = tiny_model("llama")
    found = HFEngine(model).generate(PROMPTS, replace(GREEDY, temperature=1.3))
    for i, completion in enumerate(found):
        prompt = PROMPTS[i // 2].tokens
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 1.3).log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_answers_depend_neither_on_batch_size_nor_on_order():
    model, sampling = tiny_model(), replace(GREEDY, temperature=1.0)
    expected = {c.row: c.tokens for c in HFEngine(model).generate(PROMPTS, sampling)}
    for engine, prompts in (
        (HFEngine(model, max_num_seqs=1), PROMPTS),
        (HFEngine(model, max_num_seqs=4), PROMPTS[::-1]),
    ):
        assert {c.row: c.tokens for c in engine.generate(prompts, sampling)} == expected


def test_a_batch_ends_with_its_last_response():
    model = tiny_model()
    free = HFEngine(model).generate(PROMPTS, replace(GREEDY, ignore_eos=True))
    stops = frozenset(completion.tokens[3] for completion in free)
    calls: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[1]))
    found = HFEngine(model).generate(PROMPTS, replace(GREEDY, stop_tokens=stops))
    assert all(completion.stopped and completion.tokens[-1] in stops for completion in found)
    assert all(not set(completion.tokens[:-1]) & stops for completion in found)
    assert len(calls) == max(len(completion.tokens) for completion in found) <= 4
