"""The embedded engine as a GPU runs it, on kernels and a pool of tokens, the host looking behind the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import INTERPRETED
from tiny_models import EOS, tiny_model

from paddock.engines.rollout.base import Completion, Limits, Prompt, Sampling, requests_of
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.embedded import engine as engine_module
from paddock.engines.rollout.embedded import pool as pool_module
from paddock.engines.rollout.hf import HFEngine
from paddock.models.adapters import Lora, adapters_of, attach
from paddock.models.fused import fuse, joined

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has the same on a GPU")

SAMPLING = Sampling(max_tokens=9, stop_tokens=frozenset({EOS, *range(20, 44)}), seed=5, step=2)
PROMPTS = [
    Prompt([40 + 3 * i + j for j in range(length)], [10 * i, 10 * i + 1], max_tokens=limit)
    for i, (length, limit) in enumerate(((3, None), (7, 4), (1, 1), (5, 99)))
]

FEW, SHORT = PROMPTS[:2], replace(SAMPLING, max_tokens=5)
"""Triton's interpreter takes about half a second for each token of each row."""


@pytest.mark.parametrize("steps,together", [(1, False), (3, True)])
def test_rollouts_over_a_pool_equal_the_plain_engine_and_are_told_early(monkeypatch, steps, together):
    """`together`: the responses to a prompt read it together."""
    monkeypatch.setattr(engine_module, "STEPS", steps)
    if together:
        monkeypatch.setattr(pool_module, "SPARED", 0)
    model = tiny_model("qwen3")
    wanted = HFEngine(model).generate(PROMPTS, SAMPLING)
    engine = EmbeddedEngine(model, max_num_seqs=4, max_num_batched_tokens=8, free_cache=False)
    assert engine.on_gpu
    early: list[Completion] = []
    found = engine.generate(PROMPTS, SAMPLING, early.extend)
    assert [(one.row, one.tokens, one.stopped) for one in found] == [(o.row, o.tokens, o.stopped) for o in wanted]
    assert len({len(one.tokens) for one in found}) > 2
    assert early and all(one in found for one in early)
    assert engine.slots is not None and engine.slots.shares is together


def test_few_rows_through_thin_products_draw_the_same(monkeypatch):
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model("gemma3", **wide, head_dim=32)  # with norms behind attention and MLP
    model.set_attn_implementation("paddock")
    wanted = HFEngine(model).generate(FEW, SHORT)
    assert fuse(model) is None
    monkeypatch.setattr(joined, "is_thin", lambda x, weight: True)  # in float32 too, which alone runs here
    found = EmbeddedEngine(model, max_num_seqs=4, max_num_batched_tokens=8).generate(FEW, SHORT)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]


def test_rollouts_with_adapters_equal_the_plain_engine():
    model = attach(tiny_model("qwen2"), Lora(rank=3))
    for name, param in model.named_parameters():
        if ".lora_B." in name:
            param.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("paddock")
    wanted = HFEngine(model).generate(FEW, SHORT)
    assert fuse(model) is None
    found = EmbeddedEngine(model, max_num_seqs=4, max_num_batched_tokens=8).generate(FEW, SHORT)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    plain = tiny_model("qwen2")
    plain.load_state_dict(dict(adapters_of(model).merged(model.state_dict().items())))
    plain.set_attn_implementation("paddock")
    assert fuse(plain) is None
    wanted_merged = EmbeddedEngine(plain, max_num_seqs=4, max_num_batched_tokens=8).generate(FEW, SHORT)
    merging = EmbeddedEngine(model, max_num_seqs=4, max_num_batched_tokens=8, merge=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert merging.generate(FEW, SHORT) == wanted_merged
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with adapters_of(model).off():
        assert [one.tokens for one in HFEngine(model).generate(FEW, SHORT)] != [one.tokens for one in wanted]


def test_memory_that_was_dropped_comes_back_and_changes_no_answer():
    model = tiny_model("llama")
    engine = EmbeddedEngine(model, max_num_seqs=4, free_cache=False)
    expected = engine.generate(FEW, SHORT)
    pool = engine.slots
    assert pool is not None
    held = pool.bytes()
    pool.drop()
    assert pool.bytes() == 0
    assert engine.generate(FEW, SHORT) == expected
    assert engine.slots is pool and pool.bytes() == held
    assert engine.generate(FEW, replace(SHORT, step=3)) != expected


def test_sessions_that_read_prompts_together_have_graphs_of_their_own_and_keep_them(monkeypatch):
    monkeypatch.setattr(engine_module, "Graphs", lambda step: [step])
    engine, found = EmbeddedEngine(tiny_model("llama"), max_num_seqs=4, free_cache=False), []
    for least in (10**9, 0, 10**9, 0):
        monkeypatch.setattr(pool_module, "SPARED", least)
        engine.resume(SHORT, Limits.of(requests_of(FEW, SHORT)))
        assert engine.session is not None
        found.append(engine.recorded(engine.session))
        engine.pause()
    assert found[0] is found[2] and found[1] is found[3] and found[0] is not found[1]
