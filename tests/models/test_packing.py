"""Packed and padded rows give the same hidden state for every response token, and nothing for what does not count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, tiny_batch, tiny_model

from paddock.core.batch import Batch
from paddock.models.packing import Inputs, pack, pad, sequence_lengths
from paddock.models.sharing import pack_shared


def test_every_token_but_a_rows_last_goes_through_the_model_once():
    batch = tiny_batch(tools=True)
    inputs = pack(batch)
    assert inputs.tokens.shape == (1, sum(sequence_lengths(batch)) - len(batch))
    assert inputs.packed.lengths == sorted(length - 1 for length in sequence_lengths(batch))
    assert (inputs.tokens != 0).all()


def test_positions_begin_anew_with_each_sequence():
    inputs = pack(tiny_batch())
    expected = torch.cat([torch.arange(length) for length in inputs.packed.lengths])
    assert torch.equal(inputs.positions[0], expected)


@pytest.mark.parametrize("lay_out", [pack, pad])
def test_a_state_is_that_of_the_token_before_its_target(lay_out):
    batch = tiny_batch(tools=True)
    inputs = lay_out(batch)
    before = torch.cat([batch.prompts[:, -1:], batch.responses[:, :-1]], 1)
    row, step = batch.mask.nonzero(as_tuple=True)
    assert torch.equal(inputs.tokens.flatten()[inputs.states], before[row, step])
    assert torch.equal(inputs.targets, batch.responses[row, step])
    assert torch.equal(inputs.places, row * batch.responses.shape[1] + step)


def test_per_token_is_zero_where_no_token_counts():
    batch = tiny_batch(tools=True)
    inputs = pack(batch)
    assert torch.equal(inputs.per_token(torch.ones(len(inputs.states))), batch.mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(family):
    model, batch = tiny_model(family), tiny_batch(tools=True)
    model.set_attn_implementation("paddock")
    weight = torch.randn(int(batch.mask.sum()), model.config.hidden_size)
    found = []
    for lay_out in (pack, pad):
        states = lay_out(batch).hidden(model)
        model.zero_grad()
        (states * weight).sum().backward()
        found.append((states.detach(), [param.grad for param in model.parameters() if param.grad is not None]))
    (states, gradients), (padded_states, padded_gradients) = found
    torch.testing.assert_close(states, padded_states, atol=1e-5, rtol=1e-5)
    for gradient, padded in zip(gradients, padded_gradients, strict=True):
        torch.testing.assert_close(gradient, padded, atol=1e-5 * padded.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("lay_out", [pack, pack_shared])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_behind_the_stream_change_no_state_and_no_gradient(family, lay_out, monkeypatch):
    model, batch = tiny_model(family), tiny_batch(tools=True)
    model.set_attn_implementation("paddock")
    batch = batch.with_(prompts=batch.prompts[:1].expand_as(batch.prompts), prompt_mask=None)  # one prompt for all
    weight = torch.randn(int(batch.mask.sum()), model.config.hidden_size)
    found = []
    for more in (0, 7):
        monkeypatch.setattr(Inputs, "spare", lambda *_, more=more: more)
        states = lay_out(batch).hidden(model)
        model.zero_grad()
        (states * weight).sum().backward()
        found.append((states.detach(), [param.grad for param in model.parameters() if param.grad is not None]))
    (states, gradients), (longer_states, longer_gradients) = found
    torch.testing.assert_close(longer_states, states, atol=1e-5, rtol=1e-5)
    for gradient, longer in zip(gradients, longer_gradients, strict=True):
        torch.testing.assert_close(longer, gradient, atol=1e-5 * gradient.abs().max().item(), rtol=1e-4)


def test_bf16_streams_on_a_cpu_have_few_lengths_of_little_more_than_their_own():
    model, inputs = tiny_model("llama"), pack(tiny_batch())
    assert inputs.spare(model.float()) == 0
    model.to(torch.bfloat16)
    lengths = set()
    for length in range(100, 4096):
        tokens = inputs.tokens.new_zeros(1, length)
        lengths.add(length + replace(inputs, tokens=tokens).spare(model))
        assert length <= max(lengths) <= length + max(15, length / 32)
    assert len(lengths) < 150


def test_rows_without_a_counting_token_stay_out():
    batch = tiny_batch()
    lengths, mask = batch.lengths.clone(), batch.mask.clone()
    lengths[2], mask[2], mask[4] = 0, 0, 0  # an empty response, and one that a tool wrote
    inputs = pack(batch.with_(lengths=lengths, mask=mask))
    assert len(inputs.packed.lengths) == len(batch) - 2
    assert torch.equal(inputs.per_token(torch.ones(len(inputs.states))), mask)


def test_prompts_without_a_mask_have_no_padding():
    batch = Batch(
        row=torch.arange(2),
        group=torch.arange(2),
        prompts=torch.tensor([[5, 6], [7, 8]]),
        responses=torch.tensor([[9, 0], [10, 11]]),
        lengths=torch.tensor([1, 2]),
    )
    inputs = pack(batch)
    assert inputs.tokens.tolist() == [[5, 6, 7, 8, 10]]
    assert inputs.targets.tolist() == [9, 10, 11]
    assert inputs.states.tolist() == [1, 3, 4]
    assert inputs.per_token(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0], [2, 3]]
