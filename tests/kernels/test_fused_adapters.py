"""The fused forward of a model with adapters equals that of transformers' and peft's modules, and so do gradients."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from interpreted import DEVICE, cases, on_gpu
from tiny_models import tiny_batch, tiny_model
from torch import Tensor

from paddock.config.engine import OptimConfig
from paddock.core.device import CopyStream
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.offload import Offload
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.adapters import Adapters, Lora, adapters_of, attach, is_adapter, merged_weight
from paddock.models.attention import Packed, SharedPrompts
from paddock.models.forward import FUSED, hidden_states, module_states
from paddock.models.fused import fuse, fused

LORA = Lora(rank=3, alpha=6)


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch):
    monkeypatch.setattr("paddock.models.fused.decoder.PROBE", 5)


def adapted(family: str = "qwen3", lora: Lora = LORA, layers: int = 1) -> Any:
    """With adapters that do something."""
    model = attach(tiny_model(family, num_hidden_layers=layers), lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_B." in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
            elif name.endswith(".bias"):
                param.copy_(torch.randn(param.shape, generator=generator))
    model.set_attn_implementation("paddock")
    return model.to(DEVICE).train()


def found(model: Any) -> Adapters:
    adapters = adapters_of(model)
    assert adapters is not None
    return adapters


def same(one: Tensor | None, other: Tensor | None, tolerance: float = 1e-5, what: str = "") -> None:
    assert one is not None and other is not None, what
    assert (one - other).norm() <= tolerance * other.norm() + 1e-7, f"{what}: {(one - other).norm() / other.norm():.1e}"


def stream() -> tuple[Tensor, Tensor, Packed]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(4, 250, (1, 8), generator=generator).to(DEVICE)
    return tokens, torch.cat([torch.arange(5), torch.arange(3)])[None].to(DEVICE), Packed([5, 3], DEVICE)


def both_ways(
    model: Any, tokens: Tensor, positions: Tensor, how: Packed, keep_apart: bool = False, exact: bool = False
) -> None:
    """States and gradients, by modules and fused; what is frozen has none."""
    wanted = module_states(model, tokens, positions, how)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    (wanted * direction).sum().backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad(set_to_none=True)
    assert fuse(model, exact, keep_apart) is None and fused(model) is not None
    states = hidden_states(model, tokens, positions, how)
    (states * direction).sum().backward()
    same(states, wanted)
    trained = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert trained.keys() == grads.keys() and grads
    for name, grad in grads.items():
        same(trained[name], grad, 1e-4, name)


@pytest.mark.parametrize("family", cases("qwen2", on_gpu=["qwen3", "gemma3"]))
def test_states_and_gradients_of_every_pair_are_those_of_the_modules(family):
    model = adapted(family, layers=2)
    both_ways(model, *stream())
    trained = {name for name, param in model.named_parameters() if param.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}


@on_gpu
@pytest.mark.parametrize(
    "lora",
    [
        Lora(rank=3, targets=["q_proj", "v_proj", "up_proj"]),
        Lora(rank=3, targets=["k_proj", "o_proj", "down_proj"]),
        Lora(rank=3, targets=["model.layers.1.self_attn.q_proj"]),
    ],
    ids=["ends", "middles", "one layer"],
)
def test_some_projections_alone_may_have_adapters(lora):
    both_ways(adapted("qwen2", lora, layers=2), *stream())


@pytest.mark.parametrize("ranks", cases({"k_proj": 5}, on_gpu=[{}]))
def test_pairs_of_several_ranks_and_scales(tmp_path, ranks):
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"],
                             rank_pattern=ranks, alpha_pattern={"v_proj": 7})  # fmt: skip
    peft.get_peft_model(tiny_model(num_hidden_layers=1), config).save_pretrained(tmp_path)
    model = adapted("qwen2", Lora(start=tmp_path))
    both_ways(model, *stream())
    (beside,) = [joined.adapters for joined in fused(model).products if joined.adapters]
    assert (beside.b is None) == bool(ranks) and len(set(beside.scales)) > 1


@on_gpu
@pytest.mark.parametrize("rank", [16, 32])
def test_ranks_that_are_aligned(rank):
    both_ways(adapted("qwen2", Lora(rank=rank)), *stream())


@on_gpu
def test_adapters_that_have_memory_of_their_own():
    model = adapted("qwen2")
    both_ways(model, *stream(), keep_apart=True)
    frozen = {p.untyped_storage().data_ptr() for n, p in model.named_parameters() if not is_adapter(n)}
    assert frozen.isdisjoint(p.untyped_storage().data_ptr() for n, p in model.named_parameters() if is_adapter(n))


@pytest.mark.parametrize("exact", cases(False, on_gpu=[True]))
@pytest.mark.parametrize("family", cases("qwen2", on_gpu=["qwen3", "gemma3"]))
def test_merged_weights_compute_what_modules_do_by_them_and_train_the_adapters(family, exact):
    beside = hidden_of(adapted(family, layers=2))
    model = adapted(family, layers=2)
    found(model).hold_merged()
    both_ways(model, *stream(), exact=exact)
    with torch.no_grad():
        same(hidden_states(model, *stream()), beside)
    for joined in fused(model).products:
        assert joined.whole is None and joined.merged is not None and joined.merged.is_contiguous()
        parts = [merged_weight(pair.module) for pair in joined.adapters.pairs]
        assert torch.equal(joined.merged, torch.cat(parts))
        assert {part.untyped_storage().data_ptr() for part in parts} == {joined.merged.untyped_storage().data_ptr()}


def hidden_of(model: Any) -> Tensor:
    with torch.no_grad():
        return module_states(model, *stream())


@on_gpu
@pytest.mark.parametrize("targets", [["k_proj", "o_proj", "up_proj"], ["model.layers.1.self_attn.q_proj"]])
def test_merged_weights_of_some_projections_stand_beside_plain_ones(targets):
    model = adapted("qwen2", Lora(rank=3, targets=targets), layers=2)
    found(model).hold_merged()
    both_ways(model, *stream())


def test_merged_weights_follow_their_adapters_when_renewed_and_are_not_read_while_those_are_off():
    model = adapted("qwen2")
    found(model).hold_merged()
    assert fuse(model) is None
    with torch.no_grad():
        for name, param in model.named_parameters():
            if is_adapter(name):
                param.add_(0.1)
        found(model).renew()
        same(hidden_states(model, *stream()), module_states(model, *stream()))
        plain = tiny_model("qwen2", num_hidden_layers=1).to(DEVICE)
        own = {name.replace(".base_layer.", "."): param for name, param in model.named_parameters()}
        plain.load_state_dict(own, strict=False)
        plain.set_attn_implementation("paddock")
        assert fuse(plain) is None
        with found(model).off():
            assert torch.equal(hidden_states(model, *stream()), hidden_states(plain, *stream()))


@on_gpu
def test_merged_weights_that_were_offloaded_come_back_as_they_are():
    """What an update changed on the device is sent to the host once more; else the old copy would come back."""
    settings = Settings(optim=OptimConfig(lr=0.01), budget=Budget(64), offload_params=True, computes_merged=True)
    model = adapted("qwen2")
    engine = Engine(SingleBackend(model, settings))
    offload_idle(engine, least=1)
    batch = tiny_batch(2, prompt_len=3, response_len=4)
    for _ in range(3):
        engine.move("host")
        assert not any(joined.merged.untyped_storage().nbytes() for joined in fused(model).products)
        engine.move("device")
        engine.train_step([batch], mean_log_prob, frozenset({"log_probs"}))
        now = [joined.merged.clone() for joined in fused(model).products]
        engine.move("host")
        engine.move("device")
        for joined, before in zip(fused(model).products, now, strict=True):
            assert torch.equal(joined.merged, before)
        own = dict(engine.weights())
        for name, layer in engine.adapters.layers.items():
            assert torch.equal(merged_weight(layer), own[f"{name}.weight"])


def test_weights_and_adapters_are_rows_of_one_tensor_without_gaps():
    model = adapted("qwen2")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert fuse(model) is None
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) and param.is_contiguous(), name
    for joined in fused(model).products:
        firsts = [pair.a for pair in joined.adapters.pairs]
        assert joined.whole.data_ptr() == joined.weights[0].data_ptr() and len(joined.whole) % 16 == 0
        assert torch.equal(joined.whole[: joined.rows + 3 * len(firsts)], torch.cat([*joined.weights, *firsts]))
        assert not joined.whole[joined.rows + 3 * len(firsts) :].any()
        assert firsts[-1].untyped_storage().data_ptr() == joined.whole.untyped_storage().data_ptr()


def test_updates_are_those_of_the_modules():
    batch, states = tiny_batch(2, prompt_len=3, response_len=4), []
    for by_modules in (False, True):
        model = adapted("qwen2")
        engine = Engine(SingleBackend(model, Settings(optim=OptimConfig(lr=0.01), budget=Budget(64))))
        assert fused(model) is not None
        if by_modules:
            del vars(model.base_model)[FUSED]
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        for _ in range(3):
            assert engine.train_step([batch], mean_log_prob, frozenset({"log_probs"}))["skipped"] == 0
        states.append({name: param.detach() - before[name] for name, param in model.named_parameters()})
    for name, change in states[1].items():
        assert bool(change.any()) == is_adapter(name)
        same(states[0][name], change, 1e-3, name)


def test_frozen_weights_that_are_offloaded_are_sent_once():
    settings = Settings(optim=OptimConfig(lr=0.01), budget=Budget(64), offload_params=True)
    model = adapted("qwen2")
    engine = Engine(SingleBackend(model, settings))
    offload_idle(engine, least=1)
    batch, trained = tiny_batch(2, prompt_len=3, response_len=4), list(engine.updater.params)
    engine.move("host")
    assert engine.offload.sent >= sum(param.nbytes for param in model.parameters())
    for _ in range(2):
        engine.move("device")
        before = engine.offload.sent
        engine.train_step([batch], mean_log_prob, frozenset({"log_probs"}))
        engine.move("host")
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        assert engine.offload.sent - before == sum(param.nbytes for param in trained) + buffers


def mean_log_prob(micro: Any, outputs: Any) -> Any:
    return (outputs.log_probs * micro.mask.to(DEVICE)).sum() / 20, {}


@on_gpu
def test_recomputed_layers_give_the_same_gradients():
    model = adapted()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    both_ways(model, *stream())


def test_prompts_that_are_computed_once():
    tokens, _, _ = stream()
    positions = torch.tensor([[0, 1, 0, 2, 3, 2, 1, 2]], device=DEVICE)
    both_ways(adapted("llama"), tokens, positions, SharedPrompts([2, 1], [[2, 1], [2]], DEVICE))


@on_gpu
def test_weights_beside_adapters_may_be_trained_as_well():
    model = adapted("qwen2")
    model.requires_grad_(True)
    both_ways(model, *stream())


@pytest.mark.parametrize("family", cases("qwen2", on_gpu=["qwen3", "gemma3"]))
def test_adapters_that_are_off_change_nothing_at_any_call(family):
    model = adapted(family, layers=2)
    plain = tiny_model(family, num_hidden_layers=2).to(DEVICE)
    own = {name.replace(".base_layer.", "."): param for name, param in model.named_parameters()}
    plain.load_state_dict(own, strict=False)
    plain.set_attn_implementation("paddock")
    assert fuse(plain) is None and fuse(model) is None
    with torch.no_grad():
        base = hidden_states(plain, *stream())
        on = hidden_states(model, *stream())
        with found(model).off():
            assert torch.equal(hidden_states(model, *stream()), base)
        assert torch.equal(hidden_states(model, *stream()), on)
    assert (on - base).abs().max() > 0.05


def test_in_exact_numerics_a_token_does_not_depend_on_its_company():
    model = adapted()
    assert fuse(model, exact=True) is None
    tokens, positions, how = stream()
    with torch.no_grad():
        whole = hidden_states(model, tokens, positions, how)
        same(whole, module_states(model, tokens, positions, how))
        alone = hidden_states(model, tokens[:, 5:], positions[:, 5:], Packed([3], DEVICE))
    assert torch.equal(alone, whole[:, 5:])


def test_new_values_of_adapters_are_seen_and_so_are_those_that_were_away():
    model = adapted()
    assert fuse(model) is None
    decoder = fused(model)
    assert decoder is not None
    with torch.no_grad():
        for name, param in model.named_parameters():
            if is_adapter(name):
                param.add_(0.1)
        wanted = module_states(model, *stream())
        same(hidden_states(model, *stream()), wanted)
        away = Offload(CopyStream(DEVICE), model.parameters, least=1)
        away.to_host()
        held = [joined.adapters.a.untyped_storage() for layer in decoder.layers for joined in layer.joined]
        assert not any(storage.nbytes() for storage in held)
        away.prefetch()
        away.wait()
        for name, param in model.named_parameters():
            if is_adapter(name):
                param.sub_(0.05)
        same(hidden_states(model, *stream()), module_states(model, *stream()))


def refused(change: Any = None, **fields: Any) -> str:
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    model.set_attn_implementation("paddock")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], **fields)
    peft.inject_adapter_in_model(config, model, "default")
    if change is not None:
        change(model)
    reason = fuse(model)
    assert fused(model) is None and reason is not None
    return reason


def test_adapters_of_other_kinds_are_refused_by_name():
    def second(model: Any) -> None:
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model, "second")

    def narrow(model: Any) -> None:
        for name, param in model.named_parameters():
            param.data = param.data.bfloat16() if is_adapter(name) else param.data

    assert "an adapter with dropout" in refused(lora_dropout=0.5)
    assert "not plain LoRA" in refused(use_dora=True)
    assert "not plain LoRA" in refused(lora_bias=True)
    assert "more than one adapter" in refused(second)
    assert "bfloat16 beside weights in torch.float32" in refused(narrow)
