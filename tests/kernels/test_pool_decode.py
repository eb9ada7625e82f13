"""Decoding on a GPU for families whose attention is not of the plain kind: sinks, and values narrower than keys."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, cases
from torch import Tensor, nn

from paddock.engines.rollout.base import Request
from paddock.engines.rollout.embedded.pool import TokenPool
from paddock.engines.rollout.embedded.sequences import NewTokens
from paddock.kernels import decode
from paddock.models.attention import Packed, Scores

LENGTHS, HEADS, KEYS = [5, 70], 4, 2


class Layer(nn.Module):
    layer_idx = 0


def stream(count: int, heads: int, dim: int) -> Tensor:
    return torch.randn(1, heads, count, dim, device=DEVICE)


@pytest.mark.parametrize("splits", cases(4, on_gpu=[1]))
@pytest.mark.parametrize("window", cases(6, on_gpu=[None]))
@pytest.mark.parametrize(("dim", "value_dim", "sunk"), [(16, 16, True), (24, 12, False), (12, 24, False)])
def test_a_decoded_query_gets_what_packing_gives_the_last_one(monkeypatch, splits, window, dim, value_dim, sunk):
    torch.manual_seed(0)
    monkeypatch.setattr(decode, "splits_of", lambda *_: splits)
    total = sum(LENGTHS)
    q, k, v = stream(total, HEADS, dim), stream(total, KEYS, dim), stream(total, KEYS, value_dim)
    sinks = torch.randn(HEADS, device=DEVICE) if sunk else None
    wanted = Packed(LENGTHS, DEVICE).attend(Layer(), q, k, v, Scores(0.3, window, None, sinks))[0]
    ends = torch.tensor(LENGTHS, device=DEVICE).cumsum(0) - 1
    kept = torch.ones(total, dtype=torch.bool, device=DEVICE)
    kept[ends] = False
    shorter = [length - 1 for length in LENGTHS]
    pool = TokenPool(len(LENGTHS), 128, 16, DEVICE)
    requests = [Request(list(range(length)), [row], [row], 0, 9) for row, length in enumerate(shorter)]
    assert pool.admit(requests) == len(LENGTHS)
    prompts = pool.prefill(shorter, [range(row, row + 1) for row in range(len(LENGTHS))], DEVICE)
    prompts.attend(Layer(), *(x[:, :, kept] for x in (q, k, v)), Scores(0.3, window, None, sinks))
    last = (x[0, :, ends].transpose(0, 1)[:, :, None] for x in (q, k, v))
    nobody = torch.zeros(len(shorter), dtype=torch.bool, device=DEVICE)
    found = pool.decode(torch.tensor(shorter, device=DEVICE), nobody).attend(
        Layer(), *last, Scores(0.3, window, None, sinks)
    )
    torch.testing.assert_close(found[:, 0], wanted[ends], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", cases(20, on_gpu=[None]))
def test_rows_that_read_prompts_together_get_what_they_read_alone_after_moves_and_beside_new_tokens(window):
    """Rows of finished sequences are taken by others, so that those of one prompt are not neighbours; some are done but
    not retired, some stand for nothing, and new tokens of two sequences stand behind them."""
    torch.manual_seed(0)
    lengths, sizes, dim = [70, 5, 40], [4, 3, 2], 16
    pool = TokenPool(12, 128, 16, DEVICE)
    starts = [sum(sizes[:i]) for i in range(3)]
    rows = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    requests = [Request(list(range(n)), own, own, 0, 9) for n, own in zip(lengths, rows, strict=True)]
    assert pool.admit(requests) == 3
    scores = Scores(0.3, window)
    streams = stream(sum(lengths), HEADS, dim), stream(sum(lengths), KEYS, dim), stream(sum(lengths), KEYS, dim)
    pool.prefill(lengths, [range(own[0], own[-1] + 1) for own in rows], DEVICE).attend(Layer(), *streams, scores)
    pool.release([1, 5])
    pool.move(*torch.tensor([[7, 8], [1, 5]], device=DEVICE), [7, 8], [1, 5], torch.zeros(2))
    pool.shrink(7)
    before = torch.tensor([72, 43, 70, 75, 5, 40, 8, 0, 0], device=DEVICE)
    done = torch.tensor([0, 0, 0, 1, 0, 0, 0, 1, 1], dtype=torch.bool, device=DEVICE)
    beside = pool.extend([NewTokens(2, 70, [5, 6, 7], 0), NewTokens(4, 5, [8, 9], 0)])
    assert beside is not None
    count = len(before) + beside.size
    q, k, v = (torch.randn(count, heads, 1, dim, device=DEVICE) for heads in (HEADS, KEYS, KEYS))
    found = []
    for pool.shares in (False, True):
        how = pool.decode(before, done, beside)
        assert (how.pieces.by_prompt is not None) is pool.shares
        found.append(how.attend(Layer(), q, k, v, scores))
    real = [*range(7), *range(len(before), len(before) + 5)]  # others write one row of the buffers, in any order
    torch.testing.assert_close(found[1][real], found[0][real], atol=1e-5, rtol=1e-4)
