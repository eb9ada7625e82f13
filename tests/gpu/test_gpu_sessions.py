"""Sessions on a GPU: interrupted responses and conversations, by graphs, and bit for bit in exact numerics."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sessions import PROMPTS, SAMPLED, close, converse, interrupted
from stops import letter_tokenizer
from tiny_models import FAMILIES, tiny_model

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.engines.rollout.base import requests_of
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.rollout.stops import StopTables
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PLAIN = replace(SAMPLED, temperature=1.0)
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}


def engine_of(family: str, dtype: torch.dtype = torch.float32, exact: bool = False, **shape: int) -> Engine:
    model = tiny_model(family, **shape).to("cuda", dtype)
    model.set_attn_implementation("paddock")
    settings = Settings(optim=OptimConfig(lr=1e-3), compute=dtype, exact=exact, budget=Budget(100), total_steps=9)
    return Engine(SingleBackend(model, settings))


@pytest.mark.parametrize("exact", [False, True])
def test_interrupted_responses_draw_what_they_would_have_drawn(exact):
    dtype, atol = (torch.bfloat16, 0.0) if exact else (torch.float32, 2e-4)
    engine = engine_of("qwen2", dtype, exact, **SHAPE)
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, free_cache=False)
    assert interrupted(rollout, requests_of(PROMPTS, PLAIN), PLAIN, random.Random(1), atol) > 5


@pytest.mark.parametrize("sampling", [
    replace(PLAIN, stop=("ab<a", "\n>ab", "b\u00e9<"), max_tokens=200),
    replace(PLAIN, stop=("ab<",), min_tokens=20, max_tokens=60, stop_tokens=frozenset(range(0, 260, 9))),
    replace(PLAIN, min_tokens=20, top_p=0.9, stop_tokens=frozenset(range(0, 260, 9))),
], ids=["strings", "both", "minimum"])  # fmt: skip
def test_stop_strings_and_a_minimum_end_the_same_responses_by_graphs(sampling):
    """Steps run ahead of the host, which sees an end only after several."""
    tables = StopTables(letter_tokenizer())
    rollout = EmbeddedEngine(engine_of("qwen2").model, max_num_seqs=7, free_cache=False, stop_tables=tables)
    wanted = HFEngine(tiny_model("qwen2").cuda(), stop_tables=tables).generate(PROMPTS, sampling)
    for changed in (sampling, replace(sampling, stop=(), min_tokens=0), sampling):  # graphs of each
        found = rollout.generate(PROMPTS, changed)
    assert [(one.tokens, one.stopped) for one in found] == [(one.tokens, one.stopped) for one in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours.log_probs, theirs.log_probs, atol=2e-4)
    assert any(one.stopped for one in found) and any(graphs.replays for graphs in rollout.graphs.values())
    assert interrupted(rollout, requests_of(PROMPTS, sampling), sampling, random.Random(1), 2e-4) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_of_eight_turns_is_that_of_one_forward(family):
    engine = engine_of(family)
    for one in converse(EmbeddedEngine(engine.model, max_num_seqs=8, max_num_batched_tokens=40), 8, PLAIN):
        close([one.log_probs[at] for at in sorted(one.log_probs)], log_probs_of(engine, one).tolist(), atol=3e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_in_exact_numerics_a_conversation_has_the_bits_of_the_trainer(family):
    engine = engine_of(family, torch.bfloat16, exact=True, **SHAPE)
    for one in converse(EmbeddedEngine(engine.model, max_num_seqs=8, max_num_batched_tokens=40), 8, PLAIN):
        found = torch.tensor([one.log_probs[at] for at in sorted(one.log_probs)])
        assert torch.equal(found, log_probs_of(engine, one).cpu())


def log_probs_of(engine: Engine, one) -> torch.Tensor:
    """The trainer's log-probs of the tokens that the policy drew, from one forward over the whole conversation."""
    prompt, response = torch.tensor([one.tokens[: one.prompt]]), torch.tensor([one.tokens[one.prompt :]])
    batch = Batch(
        row=torch.tensor([0]), group=torch.tensor([0]), prompts=prompt, prompt_mask=torch.ones_like(prompt),
        responses=response, mask=torch.ones_like(response), lengths=torch.tensor([response.shape[1]]),
    )  # fmt: skip
    found = engine.forward(batch, frozenset({"log_probs"})).log_probs[0]
    return found[[at - one.prompt for at in sorted(one.log_probs)]]
