"""Each kernel equals the plain function of torch that it stands for, forward and backward."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, NARROW, cases, on_gpu
from tiny_models import FAMILIES, tiny_model, with_large_numbers
from torch import Tensor
from torch.nn.functional import gelu, silu

from paddock.engines.rollout.base import Sampling
from paddock.engines.rollout.embedded.sampling import sample_rows, uniforms
from paddock.kernels import decode
from paddock.kernels.gated import gated, gated_backward
from paddock.kernels.lora import narrow, widen
from paddock.kernels.matmul import exact_linear
from paddock.kernels.norm import add_norm, add_norm_backward
from paddock.kernels.packed import packed_attention, tiles_of
from paddock.kernels.rotary import HeadNorm, rotary_backward
from paddock.kernels.sampling import Draws, draw, fill_uniforms
from paddock.kernels.statistics import log_probs
from paddock.kernels.thin import thin_gated, thin_parts
from paddock.models.attention import Packed, Scores
from paddock.models.attention.shared_prompts import Repeated, SharedPrompts, summed
from paddock.models.forward import hidden_states, module_states
from paddock.models.fused import fuse, fused
from paddock.models.fused.passes import rotary, rotary_into
from paddock.models.token_stats import CHUNK, Head, token_stats


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_(grad)


def twins(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def same(found: Tensor | None, wanted: Tensor | None, tolerance: float = 1e-5) -> None:
    assert found is not None and wanted is not None
    assert (found - wanted).norm() <= tolerance * wanted.norm() + 1e-7


def backward(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    grads = [torch.randn_like(tensor) for tensor in found]
    for outputs in (found, wanted):
        torch.autograd.backward(outputs, grads)


def plain_norm(x: Tensor, weight: Tensor, unit: bool) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight if unit else weight)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_norm_adds_and_scales(unit, adds):
    x, branch, weight = randn(5, 24, grad=True), randn(5, 24, grad=True), randn(24, grad=True)
    y, total, scale = add_norm(x.detach(), branch.detach() if adds else None, weight, 1e-6, unit, torch.float32)
    wanted_total = x + branch if adds else x * 1
    wanted = plain_norm(wanted_total, weight, unit)
    dy, dsum = torch.randn_like(y), torch.randn_like(y)
    torch.autograd.backward((wanted, wanted_total), (dy, dsum))
    same(y, wanted)
    same(total, wanted_total)
    dx, dbranch, dweight = add_norm_backward(dy, dsum, total, weight, scale, unit, torch.float32)
    same(dx, x.grad)
    same(dweight, weight.grad)
    if adds:
        same(dbranch, branch.grad)


@pytest.mark.parametrize("unit", [None, False, True], ids=["bare", "norm", "unit norm"])
def test_rotation_of_normed_heads(unit):
    tokens, heads, keys, dim = 7, 9, 2, 12
    qkv, wq, wk = randn(tokens, (heads + 2 * keys) * dim, grad=True), randn(dim, grad=True), randn(dim, grad=True)
    cos, sin = randn(tokens, dim), randn(tokens, dim)
    norm = None if unit is None else HeadNorm(wq, wk, 1e-6, unit)
    found = rotary(qkv.detach(), cos, sin, norm, keys, dim)
    q, k, v = qkv.view(tokens, -1, dim).split([heads, keys, keys], 1)
    if unit is not None:
        q, k = plain_norm(q, wq, unit), plain_norm(k, wk, unit)
    wanted = turned(q, cos, sin), turned(k, cos, sin), v.clone()
    grads = [torch.randn_like(tensor) for tensor in found]
    torch.autograd.backward(wanted, grads)
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)
    dqkv, dwq, dwk = rotary_backward(*grads, qkv.detach(), cos, sin, norm)
    same(dqkv, qkv.grad)
    if unit is not None:
        same(dwq, wq.grad)
        same(dwk, wk.grad)
    place, buffers = torch.randperm(20, device=DEVICE)[:tokens], randn(2, 20, keys, dim)
    same(rotary_into(qkv.detach(), cos, sin, norm, buffers[0], buffers[1], place), wanted[0])
    same(buffers[0][place], wanted[1])
    same(buffers[1][place], wanted[2])


@pytest.mark.parametrize(
    "name,function", [("silu", silu), ("gelu_pytorch_tanh", lambda x: gelu(x, approximate="tanh"))]
)
def test_gated_activation(name, function):
    both = randn(3, 40, grad=True)
    first, second = both.chunk(2, -1)
    wanted, dout = function(first) * second, randn(3, 20)
    wanted.backward(dout)
    same(gated(both.detach(), name), wanted)
    dboth, out = gated_backward(dout, both.detach(), name)
    same(dboth, both.grad)
    same(out, wanted)


@pytest.mark.parametrize("unit", cases(True, on_gpu=[None, False]))
def test_numbers_in_16_bits_are_rounded_once(unit):
    x, weight, keys, dim = randn(70, 8 * 32).to(NARROW), randn(8 * 32).to(NARROW), 2, 32
    (cos, sin), wide = randn(2, 70, dim).to(NARROW), x.double()
    heads = HeadNorm(weight[:dim], weight[dim : 2 * dim], 1e-6, bool(unit)) if unit is not None else None
    q, k, _ = wide.view(70, -1, dim).split([8 - 2 * keys, keys, keys], 1)
    if heads:
        q, k = (plain_norm(y, w.double(), heads.unit) for y, w in ((q, heads.queries), (k, heads.keys)))
    gate, up = wide.chunk(2, 1)
    found = [
        add_norm(x, None, weight, 1e-6, bool(unit), NARROW)[0],
        *rotary(x, cos, sin, heads, keys, dim)[:2],
        gated(x, "silu"),
    ]
    wanted = [
        plain_norm(wide, weight.double(), bool(unit)),
        *(turned(y, cos.double(), sin.double()) for y in (q, k)),
        silu(gate) * up,
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours != theirs.to(NARROW)).double().mean() < 0.01  # float32 beside float64


@pytest.mark.parametrize("temperature", cases(0.7, on_gpu=[1.0]))
@pytest.mark.parametrize("vocab", cases(4096 + 7, on_gpu=[4096 + 16]))
def test_log_probs_of_filtered_draws_are_the_trainers_bit_for_bit(monkeypatch, vocab, temperature):
    monkeypatch.setitem(CHUNK, DEVICE.type, 2048)
    hidden, weight = randn(5, 32), randn(vocab, 32)
    tokens = torch.arange(5, device=DEVICE) * (vocab // 5)
    found = log_probs(Head(weight, exact=True).logits(hidden), tokens, temperature)
    wanted = token_stats(hidden, Head(weight, exact=True), tokens, temperature).log_probs
    assert torch.equal(found, wanted)


def gapped(x: Tensor) -> Tensor:
    """The same rows, with other numbers between them."""
    return torch.cat([x, torch.full_like(x[:, :3], torch.nan)], 1)[:, : x.shape[1]]


def test_gaps_between_rows_change_no_bit():
    x, branch, weight = randn(5, 24), randn(5, 24), randn(24)
    for given in ((x, gapped(branch)), (gapped(x), gapped(branch)), (gapped(x), None)):
        wanted = add_norm(x, None if given[1] is None else branch, weight, 1e-6, False, torch.float32)
        found = add_norm(*given, weight, 1e-6, False, torch.float32)
        assert all(map(torch.equal, found, wanted))
    scale = wanted[2]
    ours, theirs = (add_norm_backward(branch, None, y, weight, scale, False, torch.float32) for y in (gapped(x), x))
    assert torch.equal(ours[0], theirs[0])
    both, dout = randn(3, 40), randn(3, 20)
    assert torch.equal(gated(gapped(both), "silu"), gated(both, "silu"))
    dboth, out = gated_backward(dout, gapped(both), "silu", room=5)
    wanted_grad, wanted_out = gated_backward(dout, both, "silu")
    assert dboth.shape == (3, 45) and torch.equal(dboth[:, :40], wanted_grad) and torch.equal(out, wanted_out)
    qkv, cos, sin, norm = randn(7, 8 * 12), randn(7, 12), randn(7, 12), HeadNorm(randn(12), randn(12), 1e-6, False)
    grads = rotary(qkv, cos, sin, norm, 2, 12)
    assert all(map(torch.equal, rotary(gapped(qkv), cos, sin, norm, 2, 12), grads))
    ours, theirs = (
        rotary_backward(*grads, given, cos, sin, norm, room) for given, room in ((gapped(qkv), 4), (qkv, 0))
    )
    assert ours[0].shape == (7, 100) and torch.equal(ours[0][:, :96], theirs[0])


@pytest.mark.parametrize("rank", cases(3, on_gpu=[32, 70]))
@pytest.mark.parametrize("rows", [1, 67])
def test_adapters_add_to_their_columns_alone_and_backward_reads_those(rows, rank):
    columns, scales = [slice(0, 20), slice(20, 150), slice(160, 170)], [2.0, 0.5, 3.0]
    matrices = [randn(span.stop - span.start, rank) for span in columns]
    y, u = gapped(randn(rows, 180)), gapped(randn(rows, 3 * rank))
    wanted, wanted_low = y.double(), []
    for i, (span, matrix, scale) in enumerate(zip(columns, matrices, scales, strict=True)):
        wanted_low.append(scale * y[:, span].double() @ matrix.double())
        wanted[:, span] += scale * u[:, i * rank : (i + 1) * rank].double() @ matrix.double().t()
    low = gapped(randn(rows, 3 * rank))
    narrow(y, torch.cat(matrices), columns, scales, low)
    same(low.double(), torch.cat(wanted_low, 1))
    before = y.clone()
    kept = widen(y, u, torch.cat(matrices), columns, scales, keeps=True)
    assert torch.equal(kept, u) and kept.is_contiguous()
    same(y.double(), wanted)
    assert torch.equal(y[:, 150:160], before[:, 150:160]) and torch.equal(y[:, 170:], before[:, 170:])
    assert widen(before, u, torch.cat(matrices), columns, scales, keeps=False) is None and torch.equal(before, y)


@pytest.mark.parametrize("rows", cases(17, on_gpu=[1, 40, 130]))
@pytest.mark.parametrize("depth", [64, 256])
def test_parts_of_a_thin_product_add_up_to_it_and_a_norm_adds_them(rows, depth):
    x, weight, residual, scale = randn(rows, depth), randn(128, depth), randn(rows, 128), randn(128)
    parts, wanted = thin_parts(x, weight), x @ weight.t()
    assert (len(parts) > 1) is (depth == 256)
    same(parts.sum(0), wanted)
    for ours, plain in zip(add_norm(residual, parts, scale, 1e-6, False, torch.float32),
                           add_norm(residual, wanted, scale, 1e-6, False, torch.float32), strict=True):  # fmt: skip
        same(ours, plain)
    same(thin_gated(x, weight, "silu"), gated(wanted, "silu"))


@pytest.mark.parametrize("seed", cases(2**32 + 7, on_gpu=[0, 1, 2**31, 2**56 - 1]))
@pytest.mark.parametrize("count", [1, 7, 2500])
def test_uniform_numbers_are_those_of_torch_bit_for_bit(seed, count):
    columns = [[0, 3, 2**31 + 5, 9], [1, 2**20, 7, 2**32 - 1], [0, 5, 100_000, 2**31 - 3]]
    counters = torch.tensor(columns, device=DEVICE)
    whole = torch.full((4, count + 3), -1.0, dtype=torch.float64, device=DEVICE)
    fill_uniforms(whole[:, :count], counters, seed)
    assert torch.equal(whole[:, :count], uniforms(*counters, count, seed)) and (whole[:, count:] == -1.0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("words", cases(300, on_gpu=[5000]))
def test_draw_takes_a_token_of_the_plain_draws_distribution_and_keeps_the_books(temperature, words):
    rows, width = 40, 5
    logits, numbers = randn(rows, words) * 3, torch.rand(rows, width, dtype=torch.float64, device=DEVICE)
    drawn = torch.full((rows,), 2, device=DEVICE)
    drawn[0] = 3
    token, done = torch.zeros_like(drawn), torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    done[1] = True
    place = drawn.clone()
    u = numbers.gather(1, place[:, None])[:, 0]
    wanted, _ = sample_rows(logits, u, Sampling(4, frozenset(), 0, 0, temperature=temperature))
    stops = torch.stack([wanted[2], torch.tensor(-1, device=DEVICE)])
    limit = torch.full((rows,), 4, device=DEVICE)
    limit[3] = 3
    draws = Draws(numbers, torch.zeros(rows, width, dtype=torch.long, device=DEVICE), randn(rows, width), token, drawn,
                  done, limit, stops)  # fmt: skip
    draw(logits, draws, temperature)
    log_probs = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0.0:
        assert torch.equal(token, wanted)
    else:  # the plain draw's, or its neighbour where the number falls on their border as float32 sees it
        below = log_probs.exp().cumsum(-1).gather(1, token[:, None])[:, 0]
        own = log_probs.exp().gather(1, token[:, None])[:, 0]
        assert ((below - own - 2e-6 <= u) & (u <= below + 2e-6)).all()
        assert (token != wanted).sum() <= 2
    assert torch.equal(draws.tokens.gather(1, place[:, None])[:, 0], token)
    wide = log_probs.gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(draws.log_probs.gather(1, place[:, None])[:, 0].double(), wide, atol=1e-5, rtol=1e-5)
    assert drawn[:4].tolist() == [4, 2, 3, 3]
    ended = token == stops[0]
    ended[[0, 1, 3]] = True
    assert torch.equal(done, ended)


@pytest.mark.parametrize("cap", [None, 4.0])
def test_token_statistics_equal_the_softmax(cap):
    hidden, weight = randn(9, 16, grad=True), randn(700, 16, grad=True)
    hidden2, weight2 = twins(hidden, weight)
    tokens = torch.randint(700, (9,), device=DEVICE)
    found = token_stats(hidden, Head(weight, softcap=cap), tokens, 0.7, entropy=True, sum_pi_squared=True)
    z = hidden2 @ weight2.t()
    log_pi = ((z if cap is None else cap * torch.tanh(z / cap)) / 0.7).log_softmax(-1)
    wanted = log_pi.gather(1, tokens[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)
    backward((found.log_probs, found.entropy), wanted)
    same(found.log_probs, wanted[0])
    same(found.entropy, wanted[1])
    same(found.sum_pi_squared, log_pi.exp().square().sum(-1))
    same(hidden.grad, hidden2.grad, 1e-4)
    same(weight.grad, weight2.grad, 1e-4)


@pytest.mark.parametrize("recompute", cases(False, on_gpu=[True]))
@pytest.mark.parametrize("family", cases("qwen2", "gemma3", on_gpu=[*FAMILIES.keys() - {"qwen2", "gemma3"}]))
def test_fused_forward_equals_the_modules_and_so_do_gradients(family, recompute):
    if recompute and family != "qwen3":
        pytest.skip("recomputing is the same for all")
    model = tiny_model(family).to(DEVICE).train()
    model.set_attn_implementation("paddock")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(4, 250, (1, 12), device=DEVICE)
    positions, how = torch.cat([torch.arange(8), torch.arange(4)])[None].to(DEVICE), Packed([8, 4], DEVICE)
    wanted = module_states(model, tokens, positions, how)
    direction = torch.randn_like(wanted)
    (wanted * direction).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert fuse(model) is None and fused(model) is not None
    found = hidden_states(model, tokens, positions, how)
    (found * direction).sum().backward()
    same(found, wanted)
    for name, parameter in model.named_parameters():
        if name in grads:
            same(parameter.grad, grads[name], 1e-4)


@on_gpu
def test_a_model_whose_own_forward_rounds_much_away_is_fused_all_the_same():
    model = with_large_numbers(tiny_model().to(DEVICE, torch.bfloat16))
    model.set_attn_implementation("paddock")
    tokens, positions = torch.arange(5, 29, device=DEVICE)[None], torch.arange(24, device=DEVICE)[None]
    with torch.no_grad():
        own = module_states(model, tokens, positions, Packed([24], DEVICE))
        assert fuse(model) is None
        found = hidden_states(model, tokens, positions, Packed([24], DEVICE))
    assert (found - own).norm() > 0.2 * own.norm(), "else nothing was rounded away"


@pytest.mark.parametrize("window,cap", cases((5, None), on_gpu=[(None, None), (None, 3.0)]))
def test_exact_attention_is_attention_and_decode_gives_the_same_bits(window, cap):
    lengths, heads, keys, dim = [70, 3, 130], 4, 2, 16
    tokens = sum(lengths)
    q, k, v = randn(tokens, heads, dim), randn(tokens, keys, dim), randn(tokens, keys, dim)
    found = packed_attention(q, k, v, tiles_of(lengths, DEVICE), Scores(0.3, window, cap))
    wanted = Packed(lengths, "cpu").attend(
        None, *(x.cpu().transpose(0, 1)[None] for x in (q, k, v)), Scores(0.3, window, cap)
    )
    same(found.cpu(), wanted[0])
    starts = [0, 70, 73]
    last = torch.tensor([start + length - 1 for start, length in zip(starts, lengths, strict=True)], device=DEVICE)
    columns = [starts, [length - 1 for length in lengths], last.tolist(), [length - 1 for length in lengths]]
    pieces = decode.Pieces(*torch.tensor(columns, dtype=torch.int32, device=DEVICE))
    one = decode.decode_attention(q[last], k, v, pieces, Scores(0.3, window, cap), exact=True)
    assert torch.equal(one, found[last])


def test_exact_products_do_not_depend_on_the_company_of_a_row():
    x, weight, bias = randn(150, 70), randn(200, 70), randn(200)
    found = exact_linear(x, weight, bias)
    same(found, x @ weight.t() + bias, 1e-5)
    assert torch.equal(exact_linear(x[40:47], weight, bias), found[40:47])
    assert torch.equal(exact_linear(x, weight[:128]), exact_linear(x, weight)[:, :128])


@pytest.mark.parametrize(
    "dtype,heads,dim",
    cases((torch.float32, 3, 20), on_gpu=[(torch.bfloat16, 2, 64), (torch.float32, 1, 5000)]),
)
def test_keys_of_prompts_are_copied_to_every_response_and_their_gradients_summed(dtype, heads, dim):
    """The last width has more numbers a token than a tile; 3 tokens behind the last response have no copy."""
    how = SharedPrompts([5, 90, 7], [[3, 4, 0], [], [70, 1]], DEVICE)
    tokens = sum(how.lengths) + 3
    k, v = (torch.randn(tokens, heads, dim, device=DEVICE).to(dtype).requires_grad_() for _ in range(2))
    assert how.tiles_of(k, v) is not None
    found, wanted = Repeated.apply(k, v, how), tuple(x.double().index_select(0, how.sources) for x in (k, v))
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, wanted, strict=True))
    grads = [torch.randn_like(x) for x in found]
    mine = torch.autograd.grad(found, (k, v), grads)
    theirs = torch.autograd.grad(wanted, (k, v), [grad.double() for grad in grads])
    again = torch.autograd.grad(Repeated.apply(k, v, how), (k, v), grads)
    for a, b, c, grad in zip(mine, theirs, again, grads, strict=True):
        for other in (b, summed(grad, how.sources, tokens)):
            torch.testing.assert_close(a, other, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert torch.equal(a, c)
