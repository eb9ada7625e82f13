"""Chunked log-probs, entropy and sum pi^2 equal log_softmax, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

import paddock.models.token_stats as module
from paddock.models.token_stats import Head, token_stats

ROWS, HIDDEN, VOCABULARY = 11, 6, 17


def make(dtype: torch.dtype = torch.float64, **options: object) -> tuple[Tensor, Head, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if options.pop("biased", False) else None
    return hidden, Head(weight, bias, **options), torch.randint(VOCABULARY, (ROWS,))


def plain(hidden: Tensor, head: Head, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    z = head.scale * (hidden @ head.weight.t() + (0 if head.bias is None else head.bias))
    z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    log_pi = torch.log_softmax(z / temperature, -1)
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    return log_pi.gather(-1, tokens[:, None])[:, 0], entropy, log_pi.exp().square().sum(-1)


@pytest.fixture(params=[1, 5, 1000], ids=lambda size: f"chunks-of-{size}")
def _chunk(request, monkeypatch):
    monkeypatch.setitem(module.CHUNK, "cpu", request.param)


OPTIONS = [{}, {"biased": True}, {"softcap": 2.0}, {"scale": 0.5}, {"biased": True, "softcap": 3.0, "scale": 1.5}]


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("use", ["log_probs", "entropy", "both"])
def test_values_and_gradients_are_exact(options, temperature, use):
    hidden, head, tokens = make(**dict(options))
    stats = token_stats(hidden, head, tokens, temperature, entropy=True, sum_pi_squared=True)
    expected = plain(hidden, head, tokens, temperature)
    for got, want in zip((stats.log_probs, stats.entropy, stats.sum_pi_squared), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    def total(log_probs: Tensor, entropy: Tensor) -> Tensor:
        a, b = torch.linspace(-1, 1, ROWS).double(), torch.linspace(2, 1, ROWS).double()
        return (0 if use == "entropy" else (a * log_probs).sum()) + (0 if use == "log_probs" else (b * entropy).sum())

    inputs = [x for x in (hidden, head.weight, head.bias) if x is not None]
    got = torch.autograd.grad(total(stats.log_probs, stats.entropy), inputs)
    want = torch.autograd.grad(total(expected[0], expected[1]), inputs)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("_chunk")
def test_bf16_weights_are_summed_in_float32():
    hidden, head, tokens = make(torch.bfloat16)
    wide = Head(head.weight.detach().double())
    stats = token_stats(hidden, head, tokens, entropy=True)
    log_probs, entropy, _ = plain(hidden.detach().double(), wide, tokens, 1.0)
    assert stats.log_probs.dtype == torch.float32
    torch.testing.assert_close(stats.log_probs.double(), log_probs, atol=0.03, rtol=0.01)  # logits rounded to bf16
    torch.testing.assert_close(stats.entropy.double(), entropy, atol=0.03, rtol=0.01)
    stats.log_probs.sum().backward()
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.bfloat16


def test_far_logits_do_not_overflow():
    hidden, head, tokens = make()
    stats = token_stats(hidden * 1000, head, tokens, entropy=True, sum_pi_squared=True)
    assert all(torch.isfinite(x).all() for x in (stats.log_probs, stats.entropy, stats.sum_pi_squared))
    stats.log_probs.sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_logits_of_a_batch_never_exist_at_once(monkeypatch):
    monkeypatch.setitem(module.CHUNK, "cpu", 7)
    widths = []
    logits = Head.logits

    def spy(self: Head, hidden: Tensor) -> Tensor:
        widths.append(len(self.weight))
        return logits(self, hidden)

    monkeypatch.setattr(Head, "logits", spy)
    hidden, head, tokens = make()
    token_stats(hidden, head, tokens).log_probs.sum().backward()
    assert widths == [7, 7, 3] * 2


@pytest.mark.usefixtures("_chunk")
def test_a_row_does_not_depend_on_the_others():
    hidden, head, tokens = make()
    whole = token_stats(hidden, head, tokens, entropy=True)
    for row in range(ROWS):
        alone = token_stats(hidden[row : row + 1], head, tokens[row : row + 1], entropy=True)
        torch.testing.assert_close(alone.log_probs[0], whole.log_probs[row], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(alone.entropy[0], whole.entropy[row], rtol=1e-13, atol=1e-13)


def other_heads() -> dict[str, object]:
    shape = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {
        "cohere": CohereForCausalLM(CohereConfig(**shape, logit_scale=0.3)),
        "granite": GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=4.0)),
    }


@pytest.mark.parametrize("family", [*FAMILIES, "cohere", "granite"])
def test_the_head_gives_the_models_own_logits(family):
    torch.manual_seed(0)
    model = tiny_model(family) if family in FAMILIES else other_heads()[family]
    tokens = torch.randint(4, 40, (1, 9))
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens).last_hidden_state[0]
        torch.testing.assert_close(Head.of(model).logits(hidden), model(tokens).logits[0], atol=1e-5, rtol=1e-5)
