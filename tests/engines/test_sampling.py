"""Draws follow the distribution, filters drop what they say, and nothing depends on the rest of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paddock.engines.rollout.base import Sampling
from paddock.engines.rollout.embedded import sampling as sampling_module
from paddock.engines.rollout.embedded.sampling import draw, keep, likeliest, sample, uniforms

SAMPLING = Sampling(max_tokens=1, stop_tokens=frozenset(), seed=7, step=3)
SIZES = (5, 256, 320, 1000)  # below, at, and beyond one block; with and without a rest


def numbers(n: int) -> Tensor:
    return drawn(torch.arange(n), SAMPLING)[:, 0]


def drawn(rows: Tensor, sampling: Sampling, start: int = 0) -> Tensor:
    return uniforms(
        rows, torch.full_like(rows, sampling.step), torch.full_like(rows, start), sampling.max_tokens, sampling.seed
    )


def plain_keep(probs: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One row at a time, word by word."""
    result = torch.zeros_like(probs)
    for r, row in enumerate(probs.tolist()):
        order = sorted(range(len(row)), key=lambda word: -row[word])
        kept = order[:top_k] if top_k > 0 else order
        mass, before, nucleus = top_p * sum(row[word] for word in kept), 0.0, []
        for word in kept:
            if before < mass or top_p == 1.0:
                nucleus.append(word)
            before += row[word]
        peak = max(row)
        for word in nucleus:
            if row[word] >= min_p * peak:
                result[r, word] = probs[r, word]
    return result


@pytest.mark.parametrize("size", SIZES)
def test_frequencies_pass_a_chi_square_test_against_the_exact_probabilities(size):
    torch.manual_seed(size)
    logits = torch.randn(size) * 2
    draws = 40_000
    tokens, _ = sample(logits.expand(draws, size), numbers(draws), replace(SAMPLING, temperature=0.8))
    expected = (logits / 0.8).softmax(-1) * draws
    common = expected >= 5
    seen = torch.bincount(tokens, minlength=size).float()
    seen, expected = (torch.cat([x[common], x[~common].sum()[None]]) for x in (seen, expected))
    some = expected > 0
    statistic = ((seen - expected)[some] ** 2 / expected[some]).sum()
    freedom = int(some.sum()) - 1
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5 + 10  # beyond four sigma


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (-1, 0.7, 0.0), (4, 0.5, 0.0), (-1, 1.0, 0.2),
                                                       (40, 0.9, 0.02), (10_000, 1.0, 0.0)])  # fmt: skip
def test_filters_keep_what_a_plain_reference_keeps(size, top_k, top_p, min_p):
    torch.manual_seed(1)
    probs = (torch.randn(20, size) * 3).softmax(-1)
    kept = keep(probs, replace(SAMPLING, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(kept, plain_keep(probs, top_k, top_p, min_p))


def test_top_p_of_a_flat_distribution_is_exact_too():
    torch.manual_seed(1)
    probs = torch.cat([torch.randn(1, 2000) * 0.1, torch.randn(1, 2000) * 5]).softmax(-1)
    kept = keep(probs, replace(SAMPLING, top_p=0.9))
    assert torch.equal(kept, plain_keep(probs, -1, 0.9, 0.0))
    assert (kept[0] > 0).sum() > 512


def test_filtered_draws_come_from_the_kept_words_and_report_the_unfiltered_log_prob():
    torch.manual_seed(2)
    logits = torch.randn(500, 320) * 3
    options = replace(SAMPLING, temperature=1.7, top_k=5, top_p=0.8, min_p=0.1)
    tokens, log_probs = sample(logits, numbers(500), options)
    full = (logits / 1.7).log_softmax(-1)
    kept = keep(full.exp(), options)
    assert (kept.gather(1, tokens[:, None]) > 0).all()
    torch.testing.assert_close(log_probs, full.gather(1, tokens[:, None])[:, 0], atol=1e-6, rtol=0)
    assert len(tokens.unique()) > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_temperature_zero_takes_the_first_likeliest_word_and_its_log_prob_at_temperature_one(size, dtype):
    torch.manual_seed(3)
    logits = torch.randn(50, size).to(dtype)
    tokens, log_probs = sample(logits, numbers(50), replace(SAMPLING, temperature=0.0))
    assert torch.equal(tokens, logits.float().argmax(-1))
    torch.testing.assert_close(log_probs, logits.float().log_softmax(-1).amax(-1), atol=1e-6, rtol=0)
    assert torch.equal(likeliest(torch.ones(2, size)), torch.zeros(2, dtype=torch.long))


def test_a_row_draws_the_same_token_in_any_batch_and_order():
    torch.manual_seed(4)
    logits, row, longer = torch.randn(100, 1000), torch.randint(10_000, (100,)), replace(SAMPLING, max_tokens=9)
    for options in (longer, replace(longer, top_k=20), replace(longer, top_p=0.9, min_p=0.01)):
        u = drawn(row, options)[:, 8]
        tokens, log_probs = sample(logits, u, options)
        order = torch.randperm(100)
        shuffled = sample(logits[order], drawn(row[order], options)[:, 8], options)
        assert torch.equal(shuffled[0], tokens[order]) and torch.equal(shuffled[1], log_probs[order])
        alone = [sample(logits[i : i + 1], u[i : i + 1], options)[0] for i in range(0, 100, 9)]
        assert torch.equal(torch.cat(alone), tokens[::9])


def test_batches_larger_than_the_cache_draw_the_same_tokens(monkeypatch):
    logits, u = torch.randn(100, 1000), numbers(100)
    whole = sample(logits, u, SAMPLING)
    monkeypatch.setattr(sampling_module, "CACHE", 7000)
    parts = sample(logits, u, SAMPLING)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_seed_step_row_and_position_each_change_the_number():
    row, longer = torch.arange(64), replace(SAMPLING, max_tokens=3)
    u = drawn(row, longer)
    others = [
        drawn(row, replace(longer, seed=8)),
        drawn(row, replace(longer, step=4)),
        drawn(row + 64, longer),
    ]
    every = torch.cat([u, *others])
    assert u.shape == (64, 3) and len(every.unique()) == every.numel()
    assert torch.equal(drawn(row, replace(longer, max_tokens=2)), u[:, :2])
    assert torch.equal(drawn(row, replace(longer, max_tokens=2), start=1), u[:, 1:])


@pytest.mark.parametrize("size", SIZES)
def test_the_draw_never_picks_a_word_of_weight_zero_even_at_the_ends(size):
    ends = torch.tensor([0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    for only in (0, size // 2, size - 1):
        weights = torch.zeros(len(ends), size)
        weights[:, only] = 1e-30
        assert (draw(weights, ends) == only).all()
    sparse = torch.rand(4000, size) * (torch.rand(4000, size) < 0.02)
    sparse[:, size // 3] = 1e-4
    u = torch.rand(4000, dtype=torch.float64)
    assert (sparse.gather(1, draw(sparse, u)[:, None]) > 0).all()


def test_the_draw_is_the_inverse_of_the_distribution_function():
    torch.manual_seed(5)
    weights = torch.rand(1, 1000).double().float()
    edges = weights.double().cumsum(-1)[0] / weights.double().sum()
    middles = (torch.cat([edges.new_zeros(1), edges[:-1]]) + edges) / 2
    assert torch.equal(draw(weights.expand(1000, 1000), middles), torch.arange(1000))
