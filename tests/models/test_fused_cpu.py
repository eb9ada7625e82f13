"""The fused forward on a CPU: the numbers and gradients of transformers' modules, in fewer passes over memory."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, tiny_model, with_large_numbers

from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded import prepacked as prepacked_module
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.kernels.arguments import HeadNorm
from paddock.kernels.launch import INTERPRETED
from paddock.models.attention import Packed, SharedPrompts
from paddock.models.forward import hidden_states, module_states
from paddock.models.fused import fuse, fused
from paddock.models.fused.passes import (
    ACTIVATIONS,
    add_norm,
    add_norm_backward,
    gated,
    gated_backward,
    rotary,
    rotary_backward,
)
from paddock.models.load import load_causal_lm

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted: a CPU takes the way of a GPU"),
    pytest.mark.usefixtures("cpu_way"),
]
PROMPTS = [Prompt(tuple(range(5, 5 + length)), (10 * length, 10 * length + 1)) for length in (3, 11, 7)]
GREEDY = Sampling(max_tokens=20, stop_tokens=frozenset(), seed=1, step=1, temperature=0.0, ignore_eos=True)


def packed_model(family="qwen2", dtype=torch.float32, **overrides):
    model = tiny_model(family, **overrides).to(dtype)
    model.set_attn_implementation("paddock")
    return model


def close(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_norm_and_its_gradients_are_those_of_autograd(unit, adds):
    torch.manual_seed(0)
    x, branch, dy, dsum = torch.randn(4, 9, 32)
    weight, eps = torch.nn.Parameter(torch.randn(32)), 1e-5
    leaves = [tensor.clone().requires_grad_() for tensor in (x, branch)]
    total = leaves[0] + leaves[1] if adds else leaves[0]
    plain = total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + int(unit))
    wanted = torch.autograd.grad((plain * dy).sum() + (total * dsum).sum(), [leaves[0], weight])
    with torch.no_grad():
        y, kept, scale = add_norm(x, branch if adds else None, weight, eps, unit, torch.float32)
        before = kept.clone()
        dx, dbranch, dweight = add_norm_backward(dy, dsum, kept, weight, scale, unit, torch.float32)
    close([y, kept, dx, dbranch, dweight], [plain.detach(), total.detach(), wanted[0], wanted[0], wanted[1]])
    assert torch.equal(kept, before)
    frozen = add_norm_backward(dy, None, kept, weight.detach(), scale, unit, torch.float32)
    assert frozen[2] is None


@pytest.mark.parametrize("unit", [False, True])
def test_a_norm_in_bf16_is_rounded_once(unit):
    torch.manual_seed(0)
    x, weight = torch.randn(50, 48).bfloat16(), torch.randn(48).bfloat16()
    found = add_norm(x, None, weight, 1e-6, unit, torch.bfloat16)[0]
    wide = x.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight.double() + int(unit))
    assert (found != wanted.bfloat16()).float().mean() < 0.01  # float32 beside float64


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gate_and_its_gradients_are_those_of_autograd(name):
    torch.manual_seed(0)
    both, dout = torch.randn(7, 40).requires_grad_(), torch.randn(7, 20)
    gate, up = both.chunk(2, 1)
    plain = ACTIVATIONS[name][0](gate) * up
    (wanted,) = torch.autograd.grad(plain, both, dout)
    with torch.no_grad():
        close([gated(both, name), *gated_backward(dout, both, name)], [plain.detach(), wanted, plain.detach()])


@pytest.mark.parametrize("normed", [False, True])
def test_a_rotation_and_its_gradients_are_those_of_autograd(normed):
    torch.manual_seed(0)
    tokens, queries, keys, dim = 6, 4, 2, 8
    qkv = torch.randn(tokens, (queries + 2 * keys) * dim).requires_grad_()
    cos, sin = torch.randn(2, tokens, dim)  # not an angle's: halves that differ show which one is read
    weights = [torch.nn.Parameter(torch.randn(dim)) for _ in range(2)]
    norm = HeadNorm(weights[0], weights[1], 1e-6, False) if normed else None
    q, k, v = qkv.unflatten(1, (-1, dim)).split([queries, keys, keys], 1)
    if normed:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w for x, w in zip((q, k), weights, strict=True)
        )
    turned = [
        x * cos[:, None] + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin[:, None] for x in (q, k)
    ]
    plain = [*turned, v]
    grads = [torch.randn_like(part) for part in plain]
    wanted = torch.autograd.grad(plain, [qkv, *weights] if normed else [qkv], grads)
    with torch.no_grad():
        close(rotary(qkv, cos, sin, norm, keys, dim), [part.detach() for part in plain])
        close([g for g in rotary_backward(*grads, qkv, cos, sin, norm) if g is not None], wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_states_and_gradients_are_those_of_the_modules(family, checkpointing):
    model = packed_model(family)
    how = SharedPrompts([6, 7], [[9, 4, 8], [8]])
    tokens = torch.randint(4, 200, (1, sum(how.lengths) + 3), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(n) for n in (6, 7, 9, 4, 8, 8, 3)])[None]
    positions[:, 13:] += 6
    parameters = list(model.base_model.parameters())
    wanted = module_states(model, tokens, positions, how)
    weight = torch.randn_like(wanted)
    theirs = torch.autograd.grad((wanted * weight).sum(), parameters)
    assert fuse(model) is None and fused(model) is not None
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    found = hidden_states(model, tokens, positions, how)
    mine = torch.autograd.grad((found * weight).sum(), parameters)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for name, a, b in zip((n for n, _ in model.base_model.named_parameters()), mine, theirs, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6, name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_a_rollout_draws_the_same_tokens(family):
    model = packed_model(family)
    wanted = EmbeddedEngine(model).generate(PROMPTS, GREEDY)
    assert fuse(model) is None
    found = EmbeddedEngine(model).generate(PROMPTS, GREEDY)
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(mine.log_probs), torch.tensor(theirs.log_probs), rtol=1e-4, atol=1e-5)


def test_joined_weights_put_in_order_beforehand_give_the_same_bits(monkeypatch):
    model = packed_model(dtype=torch.bfloat16, tie_word_embeddings=False)
    assert fuse(model) is None
    wanted = EmbeddedEngine(model).generate(PROMPTS, GREEDY)
    monkeypatch.setattr(prepacked_module, "PAYS_FROM", 1)
    decoder = fused(model)
    with prepacked_module.prepacked(model, 6):
        packed = [joined.ordered is not None for joined in decoder.products]
        heads = [name for name, module in model.named_modules() if "forward" in vars(module)]
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU multiplies bf16 without putting weights in order")
    assert all(packed) and heads == ["lm_head"]
    assert all(joined.ordered is None for joined in decoder.products)
    assert EmbeddedEngine(model).generate(PROMPTS, GREEDY) == wanted


def test_weights_leave_the_file_that_they_were_mapped_from(tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    inside = str(tmp_path / "model.safetensors")
    with open("/proc/self/maps") as maps:
        if inside not in maps.read():
            pytest.skip("weights are not mapped here")
    assert fuse(model) is None
    with open("/proc/self/maps") as maps:
        assert inside not in maps.read()
    for joined in fused(model).products:
        assert torch.equal(joined.weight, torch.cat([weight.data for weight in joined.weights]))
        assert joined.weights[0].data_ptr() == joined.weight.data_ptr()


def test_what_the_fused_forward_does_not_compute_keeps_its_modules():
    assert "another attention" in fuse(tiny_model())
    assert "float64" in fuse(packed_model(dtype=torch.float64))
    assert "need a GPU" in fuse(packed_model(), exact=True)
    model = packed_model(dtype=torch.float64)
    tokens = torch.arange(5, 15)[None]
    assert hidden_states(model, tokens, torch.arange(10)[None], Packed([10])).dtype == torch.float64


def larger_end(model, given, output):
    return type(output)(last_hidden_state=output.last_hidden_state * 1.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.model.embed_tokens.register_forward_hook(lambda *a: a[2] * 2), None),
        (lambda model: model.model.layers[0].register_forward_pre_hook(lambda m, a: (a[0] * 1.1, *a[1:])), "before"),
        (lambda model: model.model.layers[1].register_forward_pre_hook(lambda m, a: (a[0] * 1.1, *a[1:])), "between"),
        (lambda model: model.model.norm.register_forward_hook(lambda *a: a[2] * 1.1), "a norm is a"),
        (lambda model: model.model.register_forward_hook(larger_end), "behind"),
        (lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *a: a[2] * 1.01), "other numbers"),
    ],
)
def test_a_forward_that_does_more_than_its_structure_says_is_seen(change, said, dtype):
    model = packed_model(dtype=dtype)
    change(model)
    found = fuse(model)
    assert found is None if said is None else said in found


def test_a_model_whose_own_forward_rounds_much_away_is_fused_all_the_same():
    model, wide = with_large_numbers(packed_model(dtype=torch.bfloat16)), with_large_numbers(packed_model())
    given = torch.arange(5, 29)[None], torch.arange(24)[None], Packed([24])
    with torch.no_grad():
        wanted, own = (hidden_states(each, *given).double() for each in (wide, model))
        assert fuse(model) is None
        found = hidden_states(model, *given).double()
    far, near = ((x - wanted).norm() / wanted.norm() for x in (own, found))
    assert near < 0.02 < 0.2 < far
