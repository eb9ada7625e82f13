"""The table of attention decides: each layout computes a layer with the row that the table names."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

import paddock.models.attention.choice as choice
import paddock.models.attention.hook as hook
import paddock.models.attention.packed as packed
import paddock.models.attention.shared_prompts as shared_prompts
import paddock.models.attention.slot_attention as slot_attention
from paddock.engines.rollout.embedded.slots import Slots
from paddock.kernels import native
from paddock.models.attention import AttentionCall, Packed, Scores, SharedPrompts, cache_layout, choose

MODULE = nn.Module()
MODULE.layer_idx, MODULE.num_key_value_groups = 0, 2


def call(dim: int = 16, values: int | None = None, dtype=torch.float32, keys: int = 8, **scores) -> AttentionCall:
    q, k, v = (torch.zeros(8, heads, n, dtype=dtype) for heads, n in ((4, dim), (2, dim), (2, values or dim)))
    return AttentionCall(q, k, v, Scores(1.0, **scores), keys)


SINKS = torch.zeros(4)


@pytest.mark.parametrize(
    ("asked", "way"),
    [
        (call(), "short"),
        (call(dtype=torch.bfloat16), "short"),
        (call(keys=512), "short"),
        (call(keys=513), "blocks"),
        (call(window=4), "blocks"),
        (call(softcap=30.0), "blocks"),
        (call(values=32), "blocks"),
        (call(dim=24), "blocks"),  # no whole vectors of 16 numbers
        (call(dtype=torch.float64), "blocks"),
        (call(sinks=SINKS), "sinks"),
        (call(sinks=SINKS, window=4), "sinks"),
    ],
)
def test_packed_sequences_on_a_cpu(asked, way, monkeypatch):
    if native.library() is None:
        pytest.skip("no compiler: nothing is short")
    assert choose("packed", asked) == way
    monkeypatch.setattr(native, "can_run", lambda *tensors: False)
    assert choose("packed", asked) == ("blocks" if way == "short" else way)


@pytest.mark.parametrize(
    ("asked", "way"),
    [
        (call(dtype=torch.bfloat16), "flash"),
        (call(dtype=torch.bfloat16, window=4), "flash"),
        (call(dim=256, dtype=torch.float16), "flash"),
        (call(dim=100, dtype=torch.bfloat16), "blocks"),
        (call(dim=264, dtype=torch.bfloat16), "blocks"),
        (call(dtype=torch.bfloat16, values=32), "blocks"),
        (call(dtype=torch.bfloat16, softcap=30.0), "blocks"),
        (call(dtype=torch.bfloat16, sinks=SINKS), "sinks"),
    ],
)
def test_packed_sequences_with_a_flash_kernel(asked, way, monkeypatch):
    """On a device that has one; the choice reads shapes and scores, so the tensors may be anywhere."""
    monkeypatch.setattr(choice, "has_flash", lambda tensor, window=None: True)
    monkeypatch.setattr(native, "can_run", lambda *tensors: False)
    assert choose("packed", asked) == way


@pytest.mark.parametrize("layout", ["padded", "slots"])
def test_rows(layout):
    assert choose(layout, call()) == "sdpa"
    assert choose(layout, call(softcap=30.0)) == "products"
    assert choose(layout, call(sinks=SINKS)) == "products"


def test_every_layout_serves_every_call_and_every_way_is_in_the_table():
    assert set(choice.TABLE) == set(get_args(choice.Layout))
    assert {way for rows in choice.TABLE.values() for way, _ in rows} == set(get_args(choice.Way))
    for rows in choice.TABLE.values():
        assert [serves is choice.always for _, serves in rows] == [*[False] * (len(rows) - 1), True]


def test_the_pool_is_the_cache_if_there_are_decode_kernels_for_the_weights():
    kernels = native.library() is not None
    assert cache_layout(torch.zeros(1)) == ("pool" if kernels else "slots")
    assert cache_layout(torch.zeros(1, dtype=torch.float64)) == "slots"


def watched(monkeypatch, owner: object, name: str, way: str, used: list[str]) -> None:
    real = getattr(owner, name)

    def noted(*args, **named):
        used.append(way)
        return real(*args, **named)

    monkeypatch.setattr(owner, name, staticmethod(noted) if isinstance(owner, type) else noted)


def rows(count: int, tokens: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(count, heads, tokens, dim, generator=generator) for heads in (4, 2, 2))
    return q, k, v


def kind(scores: dict[str, object]) -> str:
    return "".join(scores) or "plain"


@pytest.mark.parametrize("how", [Packed([3, 5]), SharedPrompts([3], [[2, 3]])], ids=lambda how: type(how).__name__)
@pytest.mark.parametrize("scores", [{}, {"window": 2}, {"softcap": 9.0}, {"sinks": SINKS}], ids=kind)
def test_packed_layouts_compute_with_the_way_that_the_table_names(how, scores, monkeypatch):
    used: list[str] = []
    watched(monkeypatch, packed, "packed_sinks", "sinks", used)
    watched(monkeypatch, packed.ShortAttention, "apply", "short", used)
    watched(monkeypatch, packed.BlockAttention, "apply", "blocks", used)
    out = how.attend(MODULE, *rows(1, 8), Scores(0.25, **scores))
    named = choose("packed", call(keys=how.max_len, **scores))
    assert used == [named] and out.shape == (1, 8, 4, 16)


def flash_by_loop(q, k, v, ends, lengths, scale, window, key_ends=None, key_lengths=None) -> Tensor:
    """What a flash kernel computes: the queries of a sequence are the last of its keys, and see those before."""
    key_ends, key_lengths = ends if key_ends is None else key_ends, key_lengths or lengths
    assert (ends.diff().tolist(), key_ends.diff().tolist()) == (lengths, key_lengths)
    out = []
    for number, (length, seen) in enumerate(zip(lengths, key_lengths, strict=True)):
        first, first_key = int(ends[number]), int(key_ends[number])
        query, key = torch.arange(seen - length, seen)[:, None], torch.arange(seen)
        sees = (key <= query) & (key > query - (window or seen))
        keys, values = (x[first_key : first_key + seen].repeat_interleave(2, 1) for x in (k, v))
        weights = torch.einsum("qhd,khd->hqk", q[first : first + length], keys).mul(scale)
        weights = weights.masked_fill(~sees, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("how", [Packed([3, 5]), SharedPrompts([3], [[2, 3]])], ids=lambda how: type(how).__name__)
def test_a_flash_kernel_gets_what_it_needs_of_each_layout(how, window, monkeypatch):
    """With a loop in its place, results and gradients are those of the blocks."""
    given = [x.requires_grad_() for x in rows(1, 8)]
    monkeypatch.setattr(native, "can_run", lambda *tensors: False)
    blocks = how.attend(MODULE, *given, Scores(0.25, window))
    monkeypatch.setattr(choice, "has_flash", lambda tensor, window=None: True)
    for module in (packed, shared_prompts):
        monkeypatch.setattr(module, "flash_attention", flash_by_loop)
    flash = how.attend(MODULE, *given, Scores(0.25, window))
    torch.testing.assert_close(flash, blocks, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), given) for x in (flash, blocks)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scores", [{}, {"softcap": 9.0}, {"sinks": SINKS}], ids=kind)
def test_slots_and_padded_rows_compute_with_the_way_that_the_table_names(scores, monkeypatch):
    used: list[str] = []
    for module, plain in ((slot_attention, "one_query"), (hook, "sdpa_attention_forward")):
        watched(monkeypatch, module, "padded_attention", "products", used)
        watched(monkeypatch, module, plain, "sdpa", used)
    how = Slots(2, 8).decode(torch.tensor([0, 0]), torch.zeros(2, dtype=torch.bool))
    how.attend(MODULE, *rows(2, 1), Scores(0.25, **scores))
    assert used == [choose("slots", call(**scores))]
    used.clear()
    own = {"s_aux": scores["sinks"]} if "sinks" in scores else scores
    hook.attention_forward(MODULE, *rows(2, 4), None, **own)
    assert used == [choose("padded", call(**scores))]


@pytest.mark.parametrize("masked", [True, False])
def test_the_backward_of_cudnn_is_not_used_with_a_mask(masked, monkeypatch):
    """It returns NaN for some lengths on Hopper GPUs."""
    allowed = []

    def recorded(*args: object, **kwargs: object) -> tuple[None, None]:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return None, None

    monkeypatch.setattr(hook, "sdpa_attention_forward", recorded)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    q = torch.ones(1, 2, 3, 8)
    hook.attention_forward(nn.Module(), q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.bool) if masked else None)
    assert allowed == [before and not masked] and torch.backends.cuda.cudnn_sdp_enabled() == before
