"""On a GPU, adapters through the fused forward equal peft's modules: log-probs, gradients, updates, rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import EOS, FAMILIES, one_turn_each, tiny_batch, tiny_model
from torch import Tensor

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.core.device import peak_memory, reset_peak_memory
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.adapters import Lora, attach
from paddock.models.forward import FUSED
from paddock.models.fused import fused
from paddock.models.value_head import ValueModel
from paddock.rollouts.batch import with_responses

pytest.importorskip("peft")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
LORA = Lora(rank=8, alpha=16)
SHAPE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
BOTH = frozenset({"log_probs", "entropy"})
GREEDY = Sampling(max_tokens=40, stop_tokens=frozenset({EOS}), seed=5, step=2, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=1.0, stop_tokens=frozenset(range(4, 12)))
PROMPTS = [
    Prompt([40 + 3 * i + j for j in range(length)], [100 * i + j for j in range(3)])
    for i, length in enumerate((3, 9, 1, 17, 60, 5))
]


def changed(model: Any, size: float = 0.1, seed: int = 1) -> None:
    """The adapters do something, or something else."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_B." in name:
                param.add_((torch.randn(param.shape, generator=generator) * size).to(param))


def engine_of(
    family: str,
    dtype: torch.dtype = FP32,
    lora: Lora | None = LORA,
    by_modules: bool = False,
    critic: bool = False,
    **changes: Any,
) -> Engine:
    model: Any = tiny_model(family, **SHAPE).to(DEVICE, dtype)
    model.set_attn_implementation("paddock")
    backbone = attach(model.base_model if critic else model, lora)
    changed(backbone)
    role: Any = ValueModel(backbone) if critic else backbone
    if critic:
        torch.nn.init.constant_(role.value_head.weight, 0.1)
    settings = Settings(optim=OptimConfig(lr=1e-3), compute=dtype, budget=Budget(200), total_steps=9, **changes)
    engine = Engine(SingleBackend(role, settings))
    decoder = fused(engine.backend.backbone)
    assert decoder is not None and bool(decoder.pairs) == (lora is not None)
    if by_modules:
        del vars(engine.backend.backbone.base_model)[FUSED]
    return engine


def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
    mask = micro.need("mask").to(DEVICE)
    if outputs.log_probs is None:
        assert outputs.values is not None
        return (outputs.values.square() * mask).sum() / 100, {}
    assert outputs.entropy is not None
    return (outputs.log_probs * mask).sum() / 100 - outputs.entropy.sum() / 1000, {}


def gradients(engine: Engine, want: frozenset[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Columns of a batch, and the gradients of the trained parameters' masters."""
    assert engine.updater is not None
    batch = tiny_batch(32, response_len=20)
    columns = engine.forward(batch, want)
    engine.model.train()
    engine._backward(engine.micro_batches(batch), loss, want)
    grads = {name: master.grad for name, master in engine.updater.named_masters().items()}
    assert all(grad is not None for grad in grads.values()), [name for name, grad in grads.items() if grad is None]
    return {name: getattr(columns, name) for name in want}, grads  # type: ignore[return-value]


def gap(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_log_probs_and_gradients_are_those_of_the_modules(family):
    ours, theirs = (gradients(engine_of(family, by_modules=by), BOTH) for by in (False, True))
    for name in BOTH:
        torch.testing.assert_close(ours[0][name], theirs[0][name], atol=5e-4, rtol=0)
    gaps = {name: gap(grad, theirs[1][name]) for name, grad in ours[1].items()}
    assert max(gaps.values()) <= 1e-3, max(gaps.items(), key=lambda pair: pair[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_both_are_as_near_to_float32_as_those_of_the_modules(family):
    wide = gradients(engine_of(family, by_modules=True), BOTH)
    ours, theirs = (gradients(engine_of(family, BF16, by_modules=by), BOTH) for by in (False, True))
    for name in BOTH:
        found, usual = ((way[0][name] - wide[0][name]).abs().mean().item() for way in (ours, theirs))
        assert found <= 2 * usual + 2e-3, f"{name}: {found:.1e} from float32, the modules {usual:.1e}"
    whole = [torch.cat([way[1][name].flatten() for name in wide[1]]) for way in (ours, theirs, wide)]
    found, usual = gap(whole[0], whole[2]), gap(whole[1], whole[2])
    assert found <= 1.5 * usual + 0.01, f"gradients: {found:.1e} from float32, the modules {usual:.1e}"


@pytest.mark.parametrize("changes", [{"checkpointing": True}, {"share_prompts": False}], ids=["recomputed", "alone"])
def test_recomputing_or_packing_alone_gives_the_same_gradients(changes):
    ours, theirs = (gradients(engine_of("qwen3", FP32, **keys), BOTH)[1] for keys in ({}, changes))
    gaps = {name: gap(grad, theirs[name]) for name, grad in ours.items()}
    assert max(gaps.values()) <= 1e-3, max(gaps.items(), key=lambda pair: pair[1])


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["up_proj", "down_proj"]])
def test_some_projections_alone(targets):
    lora = Lora(rank=8, targets=targets)
    ours, theirs = (gradients(engine_of("qwen2", FP32, lora, by), BOTH)[1] for by in (False, True))
    gaps = {name: gap(grad, theirs[name]) for name, grad in ours.items()}
    assert max(gaps.values()) <= 1e-3, max(gaps.items(), key=lambda pair: pair[1])


def test_a_critic_with_adapters():
    want = frozenset({"values"})
    ours, theirs = (gradients(engine_of("qwen3", FP32, critic=True, by_modules=by), want) for by in (False, True))
    torch.testing.assert_close(ours[0]["values"], theirs[0]["values"], atol=5e-4, rtol=0)
    gaps = {name: gap(grad, theirs[1][name]) for name, grad in ours[1].items()}
    assert max(gaps.values()) <= 1e-3, max(gaps.items(), key=lambda pair: pair[1])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_updates_change_adapters_alone_and_the_reference_stays(dtype):
    engine = engine_of("qwen3", dtype)
    plain = engine_of("qwen3", dtype, lora=None)
    reference = engine.without_adapters(Budget(100))
    batch = tiny_batch(8)
    base = plain.forward(batch, BOTH).log_probs
    before = engine.forward(batch, BOTH).log_probs
    assert torch.equal(reference.forward(batch, BOTH).log_probs, base)
    frozen = {n: p.detach().clone() for n, p in engine.model.named_parameters() if not p.requires_grad}
    for _ in range(3):
        numbers = engine.train_step(engine.micro_batches(batch), loss, BOTH)
        assert numbers["skipped"] == 0.0 and numbers["grad_norm"] > 0
    parameters = dict(engine.model.named_parameters())
    assert all(torch.equal(parameters[name], tensor) for name, tensor in frozen.items())
    assert (engine.forward(batch, BOTH).log_probs - before).abs().max() > 0.01
    assert torch.equal(reference.forward(batch, BOTH).log_probs, base)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_rollouts_by_graphs_use_the_adapters_and_see_new_ones(family):
    engine = engine_of(family)
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, free_cache=False)
    for sampling in (GREEDY, SAMPLED):
        found, wanted = (e.generate(PROMPTS, sampling) for e in (rollout, HFEngine(engine.model)))
        assert tokens(found) == tokens(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=5e-4, rtol=0)
    kept = dict(rollout.graphs)
    assert any(graphs.replays for graphs in kept.values())
    changed(engine.model, 0.3, seed=2)
    after = rollout.generate(PROMPTS, SAMPLED)
    assert rollout.graphs == kept and tokens(after) != tokens(found)
    assert tokens(after) == tokens(HFEngine(engine.model).generate(PROMPTS, SAMPLED))


def test_graphs_of_adapters_that_are_on_do_not_serve_when_they_are_off():
    engine = engine_of("qwen3")
    assert engine.adapters is not None
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, free_cache=False)
    on = tokens(rollout.generate(PROMPTS, GREEDY))
    base = tokens(EmbeddedEngine(engine_of("qwen3", lora=None).model).generate(PROMPTS, GREEDY))
    with engine.adapters.off():
        assert tokens(rollout.generate(PROMPTS, GREEDY)) == base != on
    assert tokens(rollout.generate(PROMPTS, GREEDY)) == on


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
def test_merged_rollouts_are_those_of_the_merged_model_and_keep_their_graphs(dtype):
    engine = engine_of("qwen3", dtype)
    assert engine.adapters is not None
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, free_cache=False, merge=True)
    kept: dict[Any, Any] = {}
    for seed in (1, 2):
        changed(engine.model, 0.3, seed)
        before = {name: tensor.clone() for name, tensor in engine.backend.tensors()}
        plain = engine_of("qwen3", dtype, lora=None)
        plain.model.load_state_dict(dict(engine.adapters.merged(engine.backend.tensors())), strict=False)
        wanted = EmbeddedEngine(plain.model, max_num_seqs=7, free_cache=False)
        for sampling in (GREEDY, SAMPLED):
            assert tokens(rollout.generate(PROMPTS, sampling)) == tokens(wanted.generate(PROMPTS, sampling))
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.backend.tensors())
        assert not kept or rollout.graphs == kept
        kept = dict(rollout.graphs)
    assert any(graphs.replays for graphs in kept.values())


@pytest.mark.parametrize("changes", [{}, {"checkpointing": True}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_by_merged_weights_in_float32_gradients_are_those_of_adapters_beside(family, changes):
    ours, theirs = (gradients(engine_of(family, computes_merged=way, **changes), BOTH) for way in (True, False))
    for name in BOTH:
        torch.testing.assert_close(ours[0][name], theirs[0][name], atol=5e-4, rtol=0)
    gaps = {name: gap(grad, theirs[1][name]) for name, grad in ours[1].items()}
    assert max(gaps.values()) <= 1e-3, max(gaps.items(), key=lambda pair: pair[1])


def test_graphs_by_merged_weights_see_each_update():
    engine, batch = engine_of("qwen3", BF16, computes_merged=True), tiny_batch(8)
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, free_cache=False, merge=True)
    kept: dict[Any, Any] = {}
    for _ in range(3):
        plain = engine_of("qwen3", BF16, lora=None)
        plain.model.load_state_dict(dict(engine.weights()), strict=False)
        wanted = EmbeddedEngine(plain.model, max_num_seqs=7, free_cache=False)
        assert tokens(rollout.generate(PROMPTS, SAMPLED)) == tokens(wanted.generate(PROMPTS, SAMPLED))
        assert not kept or rollout.graphs == kept
        kept = dict(rollout.graphs)
        engine.train_step(engine.micro_batches(batch), loss, BOTH)
    assert any(graphs.replays for graphs in kept.values())


@pytest.mark.parametrize("merged", [False, True], ids=["beside", "merged"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_in_exact_numerics_rollout_and_trainer_agree_bit_for_bit(family, merged):
    engine = engine_of(family, BF16, exact=True, computes_merged=merged)
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, max_num_batched_tokens=30)
    batch = tiny_batch()
    lengths = batch.need("prompt_mask").sum(1).tolist()
    rows = zip(batch.prompts, lengths, batch.row.tolist(), strict=True)
    prompts = [Prompt(row[len(row) - length :].tolist(), [place]) for row, length, place in rows]
    completions = rollout.generate(prompts, replace(SAMPLED, max_tokens=30))
    episodes = one_turn_each(completions, prompts, batch.group.tolist(), version=0)
    batch = with_responses(batch.with_(responses=None, mask=None, lengths=None), episodes, 0)
    found = engine.forward(batch, frozenset({"log_probs"})).log_probs
    assert torch.equal(found.cpu(), batch.need("rollout_log_probs"))


def test_adapters_that_were_away_from_the_device_compute_as_before():
    engine, batch = engine_of("qwen3", BF16), tiny_batch()
    before = engine.forward(batch, BOTH).log_probs
    engine.settings = replace(engine.settings, offload_params=True)
    offload_idle(engine, least=1)
    held = torch.cuda.memory_allocated()
    engine.move("host")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < held
    engine.move("device")
    assert torch.equal(engine.forward(batch, BOTH).log_probs, before)


def test_an_update_of_adapters_needs_less_memory_than_one_of_all_weights():
    shape = {"hidden_size": 1024, "head_dim": 64, "intermediate_size": 4096, "num_attention_heads": 16,
             "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 1024,
             "initializer_range": 0.02}  # fmt: skip
    peaks = []
    for lora in (LORA, None):
        model: Any = tiny_model("llama", **shape).to(DEVICE, BF16)
        model.set_attn_implementation("paddock")
        settings = Settings(optim=OptimConfig(lr=1e-3), compute=BF16, budget=Budget(4096), total_steps=9)
        engine = Engine(SingleBackend(attach(model, lora), settings))
        assert fused(engine.model) is not None
        batch = tiny_batch(4, prompt_len=64, response_len=192)
        for _ in range(2):
            reset_peak_memory(DEVICE)
            engine.train_step(engine.micro_batches(batch), loss, BOTH)
        peaks.append(peak_memory(DEVICE))
        del engine, model
    assert peaks[0] < 0.75 * peaks[1], f"{peaks[0] / 2**20:.0f} MiB against {peaks[1] / 2**20:.0f} MiB"
