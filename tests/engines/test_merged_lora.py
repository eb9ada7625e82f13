"""Under lora.merge an engine in one process computes by W + s B A, in training as in rollouts, and trains A and B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import EOS, one_turn_each, tiny_batch, tiny_model
from torch import Tensor

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.adapters import Lora, MergedProduct, attach, is_adapter, merged_weight
from paddock.models.forward import FUSED
from paddock.rollouts.batch import with_responses

pytest.importorskip("peft")
from test_lora_engine import LORA, WANT, log_probs, settings, trained

PROMPTS = [Prompt([40 + 3 * i + j for j in range(length)], [2 * i, 2 * i + 1]) for i, length in enumerate((3, 9, 5))]
SGD = OptimConfig(optimizer="SGD", lr=0.05)
"""Moves by a gradient itself: AdamW would magnify roundings of gradients that are almost zero."""
SAMPLED = Sampling(max_tokens=20, stop_tokens=frozenset({EOS}), seed=3, step=1)


def engine_of(
    family: str = "qwen2", merged: bool = True, fused: bool = True, lora: Lora = LORA, **changes: Any
) -> Engine:
    model = tiny_model(family).to(changes.get("compute", torch.float32))
    model.set_attn_implementation("paddock")
    own = settings(computes_merged=merged, **changes)
    engine = Engine(SingleBackend(attach(model, lora), own))
    if not fused:
        vars(model.base_model).pop(FUSED, None)
    return engine


def mean_log_prob(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.log_probs is not None
    return (outputs.log_probs * micro.need("mask")).sum() / 20, {}


def test_gradients_of_a_merged_product_are_those_of_a_loop_in_float64():
    torch.manual_seed(0)
    x, weight, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 4), (3, 4), (2, 4), (3, 2)))
    scale, dy = 1.5, torch.randn(5, 3, dtype=torch.float64)
    held = weight + scale * b @ a
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    MergedProduct.apply(leaves[0], held, None, leaves[1], leaves[2], scale).backward(dy)
    by_x, by_a, by_b = (torch.zeros_like(leaf) for leaf in leaves)
    for t in range(5):
        for i in range(3):
            for j in range(4):
                by_x[t, j] += dy[t, i] * held[i, j]
                for r in range(2):
                    by_a[r, j] += scale * dy[t, i] * b[i, r] * x[t, j]
                    by_b[i, r] += scale * dy[t, i] * a[r, j] * x[t, j]
    for leaf, wanted in zip(leaves, (by_x, by_a, by_b), strict=True):
        torch.testing.assert_close(leaf.grad, wanted)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_in_float32_training_is_that_of_adapters_beside_the_weights(family, fused):
    merged, beside = (trained(engine_of(family, merged=way, fused=fused, optim=SGD), steps=4) for way in (True, False))
    batch = tiny_batch(seed=9)
    torch.testing.assert_close(log_probs(merged, batch), log_probs(beside, batch), atol=2e-4, rtol=0)
    own = dict(beside.backend.tensors())
    for name, tensor in merged.backend.tensors():
        if is_adapter(name):
            torch.testing.assert_close(tensor, own[name], atol=2e-4, rtol=0)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
def test_in_bf16_the_policy_is_the_merged_model_bit_for_bit_after_each_step(fused):
    engine, batch = engine_of(compute=torch.bfloat16, fused=fused), tiny_batch(seed=9)
    for step in range(3):
        trained(engine, steps=1, first=step)
        model = tiny_model("qwen2").to(torch.bfloat16)
        model.set_attn_implementation("paddock")
        model.load_state_dict(dict(engine.weights()), strict=False)
        plain = Engine(SingleBackend(model, settings(optim=None, compute=torch.bfloat16)))
        if not fused:
            del vars(model.base_model)[FUSED]
        assert torch.equal(log_probs(engine, batch), log_probs(plain, batch))
        wanted = EmbeddedEngine(plain.model, max_num_seqs=4).generate(PROMPTS, SAMPLED)
        assert EmbeddedEngine(engine.model, max_num_seqs=4, merge=True).generate(PROMPTS, SAMPLED) == wanted


@pytest.mark.parametrize("kind", [EmbeddedEngine, HFEngine])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
def test_log_probs_of_a_rollout_are_the_trainers(kind, fused):
    engine = trained(engine_of(fused=fused))
    batch = answered(kind(engine.rollout_model, max_num_seqs=4).generate(PROMPTS, SAMPLED))
    mask = batch.need("mask") == 1
    own, rollout = log_probs(engine, batch), batch.need("rollout_log_probs")
    assert (own - rollout)[mask].abs().max() < 1e-5
    base = log_probs(engine.without_adapters(Budget(64)), batch)
    assert (base - rollout)[mask].abs().max() > 0.1


def answered(found: list[Any]) -> Batch:
    longest = max(len(prompt.tokens) for prompt in PROMPTS)
    rows = [(prompt, row) for prompt in PROMPTS for row in prompt.rows]
    tokens = torch.tensor([[0] * (longest - len(p.tokens)) + p.tokens for p, _ in rows])
    mask = torch.tensor([[0] * (longest - len(p.tokens)) + [1] * len(p.tokens) for p, _ in rows])
    ids = torch.tensor([row for _, row in rows])
    batch = Batch(row=ids, group=ids // 2, prompts=tokens, prompt_mask=mask)
    return with_responses(batch, one_turn_each(found, PROMPTS, [0, 1, 2], version=0), 0)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_model_before_training_bit_for_bit(compute):
    actor, batch = trained(engine_of(compute=compute)), tiny_batch(seed=9)
    model = tiny_model("qwen2").to(compute)
    model.set_attn_implementation("paddock")
    alone = Engine(SingleBackend(model, settings(optim=None, compute=compute)))
    assert torch.equal(log_probs(actor.without_adapters(Budget(64)), batch), log_probs(alone, batch))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_how_a_batch_is_split_changes_no_gradient(rows):
    ways = []
    for budget in (Budget(1024), Budget(1024, rows=rows)):
        engine = engine_of(budget=budget, optim=SGD)
        for seed in (0, 1):
            engine.train_step(engine.micro_batches(tiny_batch(seed=seed)), mean_log_prob, WANT["actor"])
        ways.append(dict(engine.backend.tensors()))
    for name, tensor in ways[0].items():
        torch.testing.assert_close(tensor, ways[1][name], atol=2e-5, rtol=0, msg=name)


def test_a_resumed_engine_computes_as_the_one_that_was_not_stopped(tmp_path):
    engine, batch = trained(engine_of(compute=torch.bfloat16)), tiny_batch(seed=9)
    engine.save(tmp_path)
    resumed = engine_of(compute=torch.bfloat16)
    resumed.load(tmp_path)
    assert torch.equal(log_probs(resumed, batch), log_probs(engine, batch))
    trained(engine, first=2), trained(resumed, first=2)
    assert torch.equal(log_probs(resumed, batch), log_probs(engine, batch))


def test_some_layers_alone_may_have_adapters():
    lora = replace(LORA, targets=["q_proj", "v_proj", "up_proj"])
    merged, beside = (trained(engine_of(lora=lora, merged=way, optim=SGD), steps=3) for way in (True, False))
    batch = tiny_batch(seed=9)
    torch.testing.assert_close(log_probs(merged, batch), log_probs(beside, batch), atol=2e-4, rtol=0)


def test_merged_weights_are_in_no_checkpoint_and_no_export(tmp_path):
    engine = trained(engine_of())
    held: list[Tensor] = [w for m in engine.model.modules() if (w := merged_weight(m)) is not None]
    assert held and not any("paddock" in name for name in engine.model.state_dict())
    engine.save(tmp_path / "checkpoint")
    engine.export(tmp_path / "model")
    from safetensors.torch import load_file

    for file in tmp_path.rglob("*.safetensors"):
        assert not any("paddock" in name for name in load_file(file))


def test_a_run_without_an_optimizer_computes_merged_too():
    engine = engine_of(optim=None)
    assert engine.updater is None and any(merged_weight(module) is not None for module in engine.model.modules())
    assert isinstance(engine.settings, Settings)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
def test_recomputed_layers_give_the_same_step(fused):
    ways = []
    for checkpointing in (True, False):
        engine = trained(engine_of(fused=fused, optim=SGD), steps=2)
        if checkpointing:
            engine.model.gradient_checkpointing_enable({"use_reentrant": False})
        engine.train_step(engine.micro_batches(tiny_batch(seed=7)), mean_log_prob, WANT["actor"])
        ways.append(dict(engine.backend.tensors()))
    for name, tensor in ways[0].items():
        torch.testing.assert_close(tensor, ways[1][name], atol=1e-5, rtol=0, msg=name)
