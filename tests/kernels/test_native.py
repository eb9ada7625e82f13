"""The kernels of a CPU: against plain float64, on every shape that leaves a rest, for any number of threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from paddock.kernels import compiler, native
from paddock.kernels.arguments import ACTIVATIONS, Draws, HeadNorm, Pieces, PromptGroups, Scores
from paddock.kernels.launch import INTERPRETED
from paddock.models.attention import SharedPrompts
from paddock.models.attention.blocks import BlockAttention
from paddock.models.fused.passes import rotary, rotary_into

pytestmark = [
    pytest.mark.skipif(compiler.library() is None, reason="no C++ compiler"),
    pytest.mark.skipif(INTERPRETED, reason="these run on a CPU as they are"),
]
TYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
"""Of numbers about 1: in bfloat16, up to two roundings of half a unit."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    size = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found.double(), wanted.double(), atol=CLOSE[dtype] * size, rtol=0)


def plain_norm(x: Tensor, weight: Tensor, eps: float, unit: bool) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + int(unit))


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("columns", [1, 15, 16, 48, 67])
@pytest.mark.parametrize(
    ("stream", "dtype"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)]
)
def test_a_norm_with_the_sum_before_it_and_back(stream, dtype, columns, unit):
    rows = 131  # sums over rows come in parts
    x, dsum = numbers(rows, columns, dtype=stream), numbers(rows, columns, dtype=stream, seed=1)
    branch, dy = numbers(rows, columns, dtype=dtype, seed=2), numbers(rows, columns, dtype=dtype, seed=3)
    weight = numbers(columns, dtype=dtype, seed=4).requires_grad_()
    y, total, scale = native.add_norm(x, branch, weight, 1e-5, unit, dtype)
    dx, dbranch, dweight = native.add_norm_backward(dy, dsum, total, weight, scale, unit, dtype)
    assert (y.dtype, total.dtype, dx.dtype, dbranch.dtype) == (dtype, stream, stream, dtype)
    close(total, x.double() + branch.double(), stream)
    leaf, wide = total.double().requires_grad_(), weight.detach().double().requires_grad_()
    wanted = plain_norm(leaf, wide, 1e-5, unit)
    by_x, by_weight = torch.autograd.grad((wanted * dy.double()).sum() + (leaf * dsum.double()).sum(), [leaf, wide])
    close(y, wanted.detach(), dtype)
    close(dx, by_x, stream)
    close(dbranch, by_x, dtype)
    close(dweight, by_weight, dtype)
    assert native.add_norm_backward(dy, None, total, weight.detach(), scale, unit, dtype)[2] is None
    again = native.add_norm(total, None, weight, 1e-5, unit, dtype)
    assert torch.equal(again[0], y) and again[1] is total


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_gate_and_back(dtype, name):
    both, dout = numbers(9, 2 * 37, dtype=dtype) * 3, numbers(9, 37, dtype=dtype, seed=1)
    leaf = both.double().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    wanted = (silu(gate) if name == "silu" else gelu(gate, approximate="tanh")) * up
    (by_both,) = torch.autograd.grad(wanted, leaf, dout.double())
    dboth, out = native.gated_backward(dout, both, name)
    close(native.gated(both, name), wanted.detach(), dtype)
    close(dboth, by_both, dtype)
    assert torch.equal(out, native.gated(both, name))


def plain_rotary(qkv: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm | None, keys: int, dim: int) -> list[Tensor]:
    heads = qkv.unflatten(1, (-1, dim))
    q, k, v = heads.split([heads.shape[1] - 2 * keys, keys, keys], 1)
    if norm is not None:
        q, k = (plain_norm(x, w, norm.eps, norm.unit) for x, w in ((q, norm.queries), (k, norm.keys)))

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    return [turn(q), turn(k), v]


@pytest.mark.parametrize("kind", ["plain", "normed", "unit"])
@pytest.mark.parametrize("dim", [8, 32, 40])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_rotation_and_back(dtype, dim, kind):
    tokens, heads, keys = 70, 4, 2
    qkv = numbers(tokens, (heads + 2 * keys) * dim, dtype=dtype)
    cos, sin = numbers(2, tokens, dim, dtype=dtype, seed=1).unbind()
    weights = numbers(2, dim, dtype=dtype, seed=2).requires_grad_()
    norm = None if kind == "plain" else HeadNorm(*weights.unbind(), 1e-6, kind == "unit")
    leaf, wide = qkv.double().requires_grad_(), weights.detach().double().requires_grad_()
    wanted = plain_rotary(
        leaf, cos.double(), sin.double(), norm and HeadNorm(*wide.unbind(), norm.eps, norm.unit), keys, dim
    )
    with torch.no_grad():
        found = rotary(qkv, cos, sin, norm, keys, dim)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs.detach(), dtype)
    grads = [numbers(*x.shape, dtype=dtype, seed=3 + i) for i, x in enumerate(wanted)]
    total = sum((x * grad.double()).sum() for x, grad in zip(wanted, grads, strict=True))
    by_qkv, by_weights = torch.autograd.grad(total, [leaf, wide], allow_unused=True)
    dqkv, *by_norm = native.rotary_backward(*grads, qkv if norm else None, cos, sin, norm)
    close(dqkv, by_qkv, dtype)
    if norm is None:
        assert by_norm == [None, None]
    else:
        close(torch.stack(by_norm), by_weights, dtype)
    keys_at, values_at = torch.zeros(2, 100, keys, dim, dtype=dtype).unbind()
    place = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:tokens]
    with torch.no_grad():
        q = rotary_into(qkv, cos, sin, norm, keys_at, values_at, place)
    assert (
        torch.equal(q, found[0]) and torch.equal(keys_at[place], found[1]) and torch.equal(values_at[place], found[2])
    )


@pytest.mark.parametrize("kind", ["plain", "normed", "unit"])
def test_gates_and_rotations_in_bf16_are_rounded_once(kind):
    dtype, dim, keys = torch.bfloat16, 32, 2
    qkv, weights = numbers(70, 8 * dim, dtype=dtype), numbers(2, dim, dtype=dtype, seed=2)
    cos, sin = numbers(2, 70, dim, dtype=dtype, seed=1).unbind()
    norm = None if kind == "plain" else HeadNorm(*weights.unbind(), 1e-6, kind == "unit")
    wide = norm and HeadNorm(*weights.double().unbind(), norm.eps, norm.unit)
    gate, up = qkv.double().chunk(2, 1)
    found = [*rotary(qkv, cos, sin, norm, keys, dim)[:2], native.gated(qkv, "silu")]
    wanted = [*plain_rotary(qkv.double(), cos.double(), sin.double(), wide, keys, dim)[:2], silu(gate) * up]
    apart = [(mine != theirs.to(dtype)).double().mean() for mine, theirs in zip(found, wanted, strict=True)]
    assert max(apart) < 0.01  # float32 beside float64


@pytest.mark.parametrize(("window", "softcap", "sunk"), [(None, None, False), (4, None, True), (None, 2.0, False)])
@pytest.mark.parametrize("dim", [8, 64, 128, 20])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_of_a_decode_step(dtype, dim, window, softcap, sunk):
    q, keys, values = numbers(3, 6, dim, dtype=dtype), *numbers(2, 60, 2, dim, dtype=dtype, seed=1).unbind()
    columns = torch.tensor([[0, 5, 10], [0, 5, 20], [7, 2, 30]], dtype=torch.int32).t().contiguous()
    pieces = Pieces(*columns.unbind(), torch.tensor([7, 5, 20]))
    sinks = numbers(6, seed=5) if sunk else None
    found = native.decode_attention(q, keys, values, pieces, Scores(0.2, window, softcap, sinks))
    for row, (prompt, length, answer) in enumerate(columns.t().tolist()):
        end = int(pieces.length[row]) + 1
        at = [*range(prompt, prompt + length), *range(answer, answer + end - length)][-(window or end) :]
        k, v = (x[at].double().repeat_interleave(3, 1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[row].double(), k) * 0.2
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(at)]
        close(found[row], torch.einsum("ht,thd->hd", weights, v), dtype)


@pytest.mark.parametrize(
    "how",
    [SharedPrompts([20, 3], [[9, 8, 1], [33]]), SharedPrompts([7], [[]]), SharedPrompts([1, 1], [[1], [2, 50]])],
)
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_of_groups_and_back(dtype, dim, how):
    tokens = sum(how.lengths) + 5  # the last of no sequence
    parts = [numbers(tokens, heads, dim, dtype=dtype, seed=heads + i) for i, heads in enumerate((6, 2, 2, 6))]
    q, k, v, grad = parts
    leaves = [part.double().requires_grad_() for part in parts[:3]]
    wanted = BlockAttention.apply(*leaves, how.blocks, Scores(0.3))
    gradients = torch.autograd.grad(wanted, leaves, grad.double())
    found = native.short_attention(q, k, v, how.prompt_groups, 0.3)
    close(found, wanted.detach(), dtype)
    for mine, theirs in zip(
        native.short_attention_backward(q, k, v, grad, how.prompt_groups, 0.3), gradients, strict=True
    ):
        close(mine, theirs, dtype)
    assert not found[-5:].any()


@pytest.mark.parametrize("words", [5, 256, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_numbers_of_a_vocabulary_met_in_chunks_and_their_gradient(words, temperature):
    logits, tokens, first = numbers(11, words) * 4, torch.arange(11) * words // 11, words // 2
    top, total, chosen, weighted, squared = torch.zeros(5, 11).unbind()
    top.fill_(torch.finfo(torch.float32).min)
    for start, part in ((0, logits[:, :first]), (first, logits[:, first:])):
        native.gather(part.contiguous(), tokens, start, temperature, top, total, chosen, weighted, squared)
    leaf = logits.double().requires_grad_()
    log_pi = (leaf / temperature).log_softmax(-1)
    log_probs, entropy = log_pi.gather(1, tokens[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)
    close(chosen - top - total.log(), log_probs.detach(), torch.float32)
    close(total.log() - weighted / total, entropy.detach(), torch.float32)
    close(squared / total.square(), log_pi.exp().square().sum(-1).detach(), torch.float32)
    outer, slope = numbers(11, seed=1), numbers(11, seed=2)
    (wanted,) = torch.autograd.grad((log_probs * outer).sum() + (entropy * slope).sum(), leaf)
    normaliser, entropies = top + total.log(), entropy.detach().float()
    for dtype in TYPES:
        rows = normaliser, entropies, outer / temperature, slope / temperature
        parts = [
            native.gradient(part.contiguous(), tokens, start, temperature, *rows, None, dtype)
            for start, part in ((0, logits[:, :first]), (first, logits[:, first:]))
        ]
        close(torch.cat(parts, 1), wanted, dtype)


def test_the_gradient_of_capped_logits_bends_with_them():
    raw, tokens, cap = numbers(6, 50) * 3, torch.arange(6), 5.0
    leaf = raw.double().requires_grad_()
    (wanted,) = torch.autograd.grad(
        (cap * torch.tanh(leaf / cap)).log_softmax(-1).gather(1, tokens[:, None]).sum(), leaf
    )
    z = (cap * torch.tanh(raw.double() / cap)).float()
    rows = z.logsumexp(-1), torch.zeros(6), torch.ones(6), None
    close(native.gradient(z, tokens, 0, 1.0, *rows, cap, torch.float32), wanted, torch.float32)


def draws(rows: int, uniform: Tensor, stops: list[int] | None = None, limit: int = 3) -> Draws:
    number, four = torch.long, 4
    return Draws(
        uniform[:, None].double().repeat(1, four), torch.zeros(rows, four, dtype=number), torch.zeros(rows, four),
        torch.zeros(rows, dtype=number), torch.zeros(rows, dtype=number), torch.zeros(rows, dtype=torch.bool),
        torch.full((rows,), limit), torch.tensor(stops or [-1]),
    )  # fmt: skip


@pytest.mark.parametrize("words", [3, 256, 777])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_draw_inverts_the_distribution_function(words, temperature):
    rows = 400
    logits, uniform = numbers(1, words).repeat(rows, 1) * 2, (torch.arange(rows) + 0.5) / rows
    state = draws(rows, uniform)
    native.draw(logits, state, temperature)
    log_pi = (logits[0].double() / (temperature or 1.0)).log_softmax(-1)
    wanted = torch.searchsorted(log_pi.exp().cumsum(0), uniform.double(), right=True)
    if temperature == 0.0:
        wanted = logits[0].argmax().repeat(rows)
    assert (state.token != wanted).sum() <= 1, "but for a number on the border of two words"
    assert torch.equal(state.tokens[:, 0], state.token) and state.drawn.tolist() == [1] * rows
    close(state.log_probs[:, 0], log_pi[state.token], torch.float32)


def test_words_without_a_chance_are_never_drawn_and_stops_and_limits_end_a_row():
    logits = torch.full((3, 300), -1e9)
    logits[:, 7] = logits[:, 290] = 0.0
    for uniform, word in ((2.0**-60, 7), (1.0 - 2.0**-53, 290)):
        state = draws(3, torch.full((3,), uniform, dtype=torch.float64), stops=[290], limit=2)
        for step in range(1, 4):
            native.draw(logits, state, 1.0)
            assert state.token.tolist() == [word] * 3
            assert state.done.tolist() == [word == 290 or step > 1] * 3
        assert state.drawn.tolist() == [1 if word == 290 else 2] * 3


def test_what_is_not_a_number_stays_visible():
    bad = numbers(2, 40)
    bad[1, 3] = torch.nan
    state = draws(2, torch.full((2,), 0.5))
    native.draw(bad, state, 1.0)
    assert state.log_probs[:, 0].isnan().tolist() == [False, True]
    for dtype in TYPES:
        x = bad.to(dtype)
        y = native.add_norm(x, None, torch.ones(40, dtype=dtype), 1e-6, False, dtype)[0]
        assert y.isnan().any(1).tolist() == [False, True]
        assert native.gated(x, "silu").isnan().any(1).tolist() == [False, True]


def test_exponentials_are_right_to_the_end_of_the_range():
    x = torch.linspace(-120, 0, 4001)
    state = native.gradient(x[None], torch.tensor([-1]), 0, 1.0, torch.zeros(1), torch.zeros(1), -torch.ones(1), None,
                            None, torch.float32)  # fmt: skip
    wanted = x.double().exp()
    inside = x > -87
    assert ((state[0].double() - wanted).abs() / wanted)[inside].max() < 3e-7
    assert not state[0][x < -87].any()


def test_the_number_of_threads_changes_no_bit():
    ends = list(itertools.accumulate([20, 30, *[40] * 6, *[50] * 5], initial=0))
    spans = [slice(*pair) for pair in itertools.pairwise(ends)]
    groups = [[spans[0], *spans[2:8]], [spans[1], *spans[8:]]]  # a prompt and the responses to it
    program = f"""
import sys, torch
from hashlib import sha256
sys.path.insert(0, {str(Path(native.__file__).parents[2])!r})
from paddock.kernels import native
from paddock.kernels.arguments import PromptGroups
torch.manual_seed(0)
bf, groups = torch.bfloat16, PromptGroups({groups!r})
x, w = torch.randn(3, 500, 96).to(bf).unbind(), torch.randn(96).to(bf).requires_grad_()
y, total, scale = native.add_norm(x[0], x[1], w, 1e-6, False, bf)
found = [y, *native.add_norm_backward(x[2], x[0], total, w, scale, False, bf)]
q, k, v = (torch.randn(groups.end, h, 64) for h in (4, 2, 2))
found += [native.short_attention(q, k, v, groups, 0.1)]
found += native.short_attention_backward(q, k, v, q, groups, 0.1)
print(torch.get_num_threads(), *[sha256(x.detach().float().numpy().tobytes()).hexdigest() for x in found])
"""
    said = []
    for threads in ("1", "2"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "TRITON_INTERPRET": "0"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert [threads for threads, *_ in said] == ["1", "2"] and said[0][1:] == said[1][1:]


def test_groups_are_told_by_their_sequences():
    groups = PromptGroups([[slice(0, 4)], [slice(4, 6), slice(6, 16), slice(16, 19)]])
    assert groups.sequences.tolist() == [[0, 4], [4, 2], [6, 10], [16, 3]] and groups.ends.tolist() == [0, 1, 4]
    assert (groups.end, groups.most_keys) == (19, 12)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.library.cache_clear()
    yield tmp_path / "paddock" / "kernels"
    compiler.library.cache_clear()


@pytest.mark.slow  # the compiler takes ten seconds
def test_a_machine_compiles_once(fresh, monkeypatch):
    assert compiler.library() is not None
    (file,) = fresh.iterdir()
    compiler.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert compiler.library() is not None
    assert [file] == list(fresh.iterdir())


@pytest.mark.slow
def test_another_processor_compiles_for_itself(fresh, monkeypatch):
    compiler.library()
    compiler.library.cache_clear()
    monkeypatch.setattr(compiler, "processor", lambda: "flags: another one")
    compiler.library()
    assert len(list(fresh.iterdir())) == 2


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_time_and_not_the_run(fresh, monkeypatch):
    fresh.parent.mkdir()
    fresh.write_text("a file where the folder should be")
    assert compiler.library() is not None


@pytest.mark.slow
def test_a_machine_without_a_home_compiles_as_well(fresh, monkeypatch):
    monkeypatch.setattr(compiler, "cache_folder", lambda kind: Path("~nobody-of-this-name").expanduser())
    assert compiler.library() is not None


@pytest.mark.parametrize(("script", "said"), [("exit 1", "cannot compile"), (None, "no C++ compiler")])
def test_without_a_compiler_that_works_torch_does_it_and_says_so(fresh, monkeypatch, caplog, tmp_path, script, said):
    folder = tmp_path / "bin"
    folder.mkdir()
    if script:
        (folder / "g++").write_text(f"#!/bin/sh\necho 'no such thing' >&2\n{script}\n")
        (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level("INFO", "paddock"):
        assert compiler.library() is None
    assert said in caplog.text and (not script or "no such thing" in caplog.text)
    assert not native.can_run(torch.zeros(1))
    assert not fresh.exists() or not list(fresh.iterdir()), "nothing half-made stays"


def test_types_that_kernels_do_not_know_are_left_to_torch():
    one, two = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    assert native.can_run(one, None) and native.can_run(two)
    assert not native.can_run(one, two) and not native.can_run(one.double()) and not native.can_run(one.half())
