"""A vocabulary that ranks share gives the statistics and gradients of a whole one, whatever the sizes of its parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from ranks import Ranks
from torch import Tensor

from paddock.models.token_choices import likeliest_tokens, log_probs_of
from paddock.models.token_stats import Head, TokenStats, token_stats

WORDS, HIDDEN, ROWS = 11, 6, 9


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def drawn(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(WORDS, HIDDEN, generator=generator)
    tokens = torch.randint(WORDS, (ROWS,), generator=generator).to(device)
    return hidden.to(device).requires_grad_(), weight.to(device) * 4, tokens


def total(stats: TokenStats) -> Tensor:
    slopes = torch.linspace(-1, 1, ROWS, device=stats.log_probs.device)
    return (slopes * stats.log_probs).sum() + (slopes.square() * stats.entropy).sum()


def on_rank(rank: int, cut: int, softcap: float | None) -> dict[str, Tensor]:
    hidden, weight, tokens = drawn(DEVICE)
    own = (weight[:cut] if rank == 0 else weight[cut:]).clone().requires_grad_()
    head = Head(own, softcap=softcap, first=cut * rank, ranks=dist.group.WORLD)
    stats = token_stats(hidden, head, tokens, 0.7, entropy=True, sum_pi_squared=True)
    total(stats).backward()
    dist.all_reduce(hidden.grad)
    return {
        "log_probs": stats.log_probs.detach(),
        "entropy": stats.entropy.detach(),
        "sum_pi_squared": stats.sum_pi_squared,
        "hidden": hidden.grad,
        "weight": own.grad,
    }


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("cut", [5, 1, 11])  # in the last one, the second rank has no word at all
def test_parts_of_a_vocabulary_add_up_to_the_whole(two, cut, softcap):
    hidden, weight, tokens = drawn()
    weight.requires_grad_()
    logits = hidden @ weight.t() if softcap is None else softcap * torch.tanh(hidden @ weight.t() / softcap)
    log_pi = (logits / 0.7).log_softmax(-1)
    pi = log_pi.exp()
    want = TokenStats(log_pi.gather(-1, tokens[:, None])[:, 0], -(pi * log_pi).sum(-1), pi.square().sum(-1).detach())
    total(want).backward()
    parts = two(on_rank, cut, softcap)
    for found in parts:
        for name in ("log_probs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(found[name], getattr(want, name), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["hidden"], hidden.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([part["weight"] for part in parts]), weight.grad, atol=1e-5, rtol=1e-5)


K = 3


def choices_on_rank(rank: int, cut: int) -> dict[str, Tensor]:
    hidden, weight, _ = drawn(DEVICE)
    own = (weight[:cut] if rank == 0 else weight[cut:]).clone().requires_grad_()
    head = Head(own, first=cut * rank, ranks=dist.group.WORLD)
    tokens, log_probs = likeliest_tokens(hidden, head, K, 0.7)
    found, kth = log_probs_of(hidden, head, tokens.flip(0), 0.7)
    (torch.linspace(-1, 2, ROWS * K, device=found.device).view(ROWS, K) * found).sum().backward()
    dist.all_reduce(hidden.grad)
    return {"tokens": tokens, "log_probs": log_probs, "found": found.detach(), "kth": kth, "hidden": hidden.grad,
            "weight": own.grad}  # fmt: skip


@pytest.mark.parametrize("cut", [5, 1, 11])
def test_the_likeliest_tokens_of_all_parts_are_those_of_the_whole(two, cut):
    hidden, weight, _ = drawn()
    weight.requires_grad_()
    log_pi = ((hidden @ weight.t()) / 0.7).log_softmax(-1)
    best = log_pi.topk(K)
    chosen = log_pi.gather(-1, best.indices.flip(0))
    (torch.linspace(-1, 2, ROWS * K).view(ROWS, K) * chosen).sum().backward()
    parts = two(choices_on_rank, cut)
    want = {"log_probs": best.values, "found": chosen, "kth": best.values[:, -1], "hidden": hidden.grad}
    for found in parts:
        assert torch.equal(found["tokens"], best.indices)
        for name, tensor in want.items():
            torch.testing.assert_close(found[name], tensor.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([part["weight"] for part in parts]), weight.grad, atol=1e-5, rtol=1e-5)
