"""Decoding on a GPU for families whose attention is not of the plain kind: sinks, and values narrower than keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
from paddock.kernels.launch import INTERPRETED

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from paddock.engines.rollout.base import Request
from paddock.engines.rollout.embedded.pool import TokenPool
from paddock.kernels import decode
from paddock.models.attention import Packed, Scores

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS, HEADS, KEYS = [5, 70], 4, 2


class Layer(nn.Module):
    layer_idx = 0


def stream(count: int, heads: int, dim: int) -> Tensor:
    return torch.randn(1, heads, count, dim, device=DEVICE)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [None, 6])
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
