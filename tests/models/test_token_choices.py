"""Chunked log-probs of several tokens equal log_softmax, and so do their gradients; the likeliest are torch.topk's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import paddock.models.token_stats as module
from paddock.models.token_choices import likeliest_tokens, log_probs_of
from paddock.models.token_stats import Head

ROWS, HIDDEN, VOCABULARY, K = 9, 6, 17, 4
OPTIONS = [{}, {"biased": True}, {"softcap": 2.0}, {"biased": True, "softcap": 3.0, "scale": 1.5}, {"never": (3,)}]


def make(**options: object) -> tuple[Tensor, Head, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True) if options.pop("biased", False) else None
    tokens = torch.stack([torch.randperm(VOCABULARY)[:K] for _ in range(ROWS)])
    return hidden, Head(weight, bias, **options), tokens


def plain(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    z = head.scale * (hidden @ head.weight.t() + (0 if head.bias is None else head.bias))
    z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    forbidden = torch.zeros(VOCABULARY, dtype=torch.bool)
    forbidden[list(head.never)] = True
    return torch.log_softmax(z.masked_fill(forbidden, module.NEVER) / temperature, -1)


@pytest.fixture(params=[1, 5, 1000], ids=lambda size: f"chunks-of-{size}")
def _chunk(request, monkeypatch):
    monkeypatch.setitem(module.CHUNK, "cpu", request.param)


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_exact(options, temperature):
    hidden, head, tokens = make(**dict(options))
    found, kth = log_probs_of(hidden, head, tokens, temperature)
    whole = plain(hidden, head, temperature)
    expected = whole.gather(-1, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kth, whole.topk(K).values[:, -1], rtol=1e-12, atol=1e-12)
    assert not kth.requires_grad
    slope = torch.linspace(-1, 2, ROWS * K, dtype=torch.float64).view(ROWS, K)
    slope = slope.masked_fill(expected < -1e6, 0)  # a token that never comes has no gradient to check
    inputs = [x for x in (hidden, head.weight, head.bias) if x is not None]
    got, want = (torch.autograd.grad((slope * x).sum(), inputs) for x in (found, expected))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("_chunk")
def test_the_likeliest_tokens_are_those_of_the_whole_vocabulary():
    hidden, head, _ = make(softcap=2.0)
    tokens, log_probs = likeliest_tokens(hidden, head, K, 0.7)
    best = plain(hidden, head, 0.7).topk(K)
    assert torch.equal(tokens, best.indices)
    torch.testing.assert_close(log_probs, best.values, rtol=1e-12, atol=1e-12)
    assert not log_probs.requires_grad


def test_no_states_give_no_log_probs():
    hidden, head, tokens = make()
    found, kth = log_probs_of(hidden[:0], head, tokens[:0])
    assert found.shape == (0, K) and kth.shape == (0,)
    assert likeliest_tokens(hidden[:0], head, K)[0].shape == (0, K)


def test_a_frozen_head_gets_no_gradient():
    hidden, head, tokens = make()
    frozen = Head(head.weight.detach())
    log_probs_of(hidden, frozen, tokens)[0].sum().backward()
    assert hidden.grad is not None and frozen.weight.grad is None
