"""Packed attention equals each sequence on its own, for every family, forward and backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny_models import FAMILIES, WINDOW, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import paddock.models.attention.blocks as blocks
from paddock.models.attention import Packed, Scores
from paddock.models.forward import hidden_states

LENGTHS = [1, 3, 9, 11, 12, 12, 20]


def sequences(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 260, (length,), generator=generator) for length in lengths]


def one_by_one(model: PreTrainedModel, rows: list[Tensor]) -> Tensor:
    model.set_attn_implementation("eager")
    return torch.cat([model.base_model(input_ids=row[None]).last_hidden_state[0] for row in rows])


def packed(model: PreTrainedModel, rows: list[Tensor]) -> Tensor:
    model.set_attn_implementation("paddock")
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return hidden_states(model, torch.cat(rows)[None], positions[None], Packed([len(row) for row in rows]))[0]


def gradients(model: PreTrainedModel, states: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    (states * weight).sum().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tile", [4, 128])
def test_packed_sequences_do_not_see_each_other(family, tile, monkeypatch):
    monkeypatch.setattr(blocks, "TILE", tile)
    assert max(LENGTHS) > WINDOW
    model, rows = tiny_model(family), sequences(LENGTHS)
    expected, got = one_by_one(model, rows), packed(model, rows)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    wanted = gradients(model, expected)
    for name, gradient in gradients(model, got).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5 * wanted[name].abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_recomputed_layers_attend_as_they_did(family):
    model, rows = tiny_model(family), sequences(LENGTHS)
    plain = gradients(model, packed(model, rows))
    model.gradient_checkpointing_enable()
    model.train()
    again = gradients(model, packed(model, rows))
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_the_order_of_sequences_does_not_matter():
    model, rows = tiny_model("mistral"), sequences([20, 1, 12, 3])
    ascending = sorted(rows, key=len)
    states = dict(zip(map(len, ascending), packed(model, ascending).split([len(r) for r in ascending]), strict=True))
    for row, found in zip(rows, packed(model, rows).split([len(row) for row in rows]), strict=True):
        torch.testing.assert_close(found, states[len(row)], atol=1e-5, rtol=1e-5)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """One sequence: q [L, H, D], k and v [L, K, D]."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    scores = 0.3 * q @ k.transpose(1, 2)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("value_dim", [8, 4])
def test_block_attention_and_its_gradient_are_exact(window, softcap, value_dim, monkeypatch):
    monkeypatch.setattr(blocks, "TILE", 5)
    torch.manual_seed(0)
    lengths = [2, 6, 7, 7]
    heads = ((4, 8), (2, 8), (2, value_dim))
    q, k, v = (torch.randn(sum(lengths), *shape, dtype=torch.float64, requires_grad=True) for shape in heads)
    layout = blocks.blocks_of(lengths, torch.device("cpu"))
    assert len(layout) == 2 and layout[1].slots is not None
    got = blocks.BlockAttention.apply(q, k, v, layout, Scores(0.3, window, softcap))
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    want = torch.cat([plain_attention(*part, window, softcap) for part in parts])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(want)
    gradients = (torch.autograd.grad((found * weight).sum(), (q, k, v)) for found in (got, want))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_responses_to_prompts_of_like_length_are_one_block_of_a_length_that_recurs():
    prompts = [slice(0, 21), slice(21, 45), slice(45, 53)]
    behind = [prompt for prompt in prompts for _ in range(8)]
    first, second = blocks.blocks_of([63] * 24, torch.device("cpu"), 53, behind)
    assert (first.rows, first.length, first.before, first.slots) == (16, 63, 24, None)
    assert [(p.rows, p.tokens) for p in first.prompts] == [(slice(0, 8), prompts[0]), (slice(8, 16), prompts[1])]
    assert (second.rows, second.before, second.start) == (8, 8, first.end)
    stream = torch.randn(second.end, 2, 3)
    keys = first.pack_keys(stream)
    assert torch.equal(keys[3, :, :21], stream[prompts[0]].transpose(0, 1)) and not keys[3, :, 84:].any()
    assert torch.equal(keys[3, :, 21:84], first.pack(stream)[3])
    assert torch.equal(keys[9, :, :24], stream[prompts[1]].transpose(0, 1))
    assert {block.length for n in range(20, 25) for block in blocks.blocks_of([n, n - 1], torch.device("cpu"))} == {24}


@pytest.mark.parametrize("lengths", [[5], [5, 5, 5], [4, 5, 40, 41, 41], [300, 2], [7] * 9])
def test_blocks_cover_the_stream_once_and_waste_little(lengths, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_SCORES", 7 * 7 * 4)
    layout = blocks.blocks_of(lengths, torch.device("cpu"))
    assert layout[0].start == 0 and layout[-1].end == sum(lengths)
    assert all(before.end == after.start for before, after in pairwise(layout))
    assert sum(block.rows for block in layout) == len(lengths)
    for block in layout:
        assert block.end - block.start >= blocks.FULL * block.rows * block.length
        assert block.rows == 1 or block.rows * block.length**2 <= blocks.MAX_SCORES
        stream = torch.randn(sum(lengths), 2, 3)
        copy = torch.zeros_like(stream)
        block.unpack(block.pack(stream), copy)
        assert torch.equal(copy[block.start : block.end], stream[block.start : block.end])


@pytest.mark.parametrize("family", FAMILIES)
def test_without_packing_it_is_the_plain_attention_of_a_padded_batch(family):
    model = tiny_model(family)
    tokens = torch.randint(4, 260, (2, 17), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    model.set_attn_implementation("eager")
    expected = model(tokens, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("paddock")
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits[mask.bool()], expected, atol=1e-4, rtol=1e-4)


def test_a_model_with_another_attention_is_not_run_packed():
    with pytest.raises(ValueError, match="attn_implementation='paddock', not 'sdpa'"):
        hidden_states(tiny_model(), torch.tensor([[5]]), torch.tensor([[0]]), Packed([1]))
