"""Attention sinks: packed, padded and from a cache, forward and backward, against a loop over queries."""

from __future__ import annotations

import pytest
import torch
from tiny_models import WINDOW
from torch import Tensor, nn

from paddock.engines.rollout.embedded.slots import Slots
from paddock.models.attention import Packed, Scores, blocks
from paddock.models.attention.padded import padded_attention
from paddock.models.attention.sinks import packed_sinks

LENGTHS = [3, 9, 10, 21]
SCALE = 0.3


def streams(heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    return draw(total, heads, 8), draw(total, kv_heads, 8), draw(total, kv_heads, 6), draw(heads)


def by_loop(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Query by query: exp(score) over the sum of all and the sink."""
    rows, start = [], 0
    for length in LENGTHS:
        for place in range(length):
            first = 0 if window is None else max(0, place - window + 1)
            seen = slice(start + first, start + place + 1)
            heads = []
            for head in range(q.shape[1]):
                mine = head // (q.shape[1] // k.shape[1])
                weights = (SCALE * k[seen, mine] @ q[start + place, head]).exp()
                heads.append(weights @ v[seen, mine] / (weights.sum() + sinks[head].exp()))
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("tile", [4, 128])
def test_packed_attention_with_sinks_and_its_gradients_are_those_of_a_loop(window, tile, monkeypatch):
    monkeypatch.setattr(blocks, "TILE", tile)
    q, k, v, sinks = streams()
    got = packed_sinks(q, k, v, Packed(LENGTHS).blocks, Scores(SCALE, window, None, sinks))
    want = by_loop(q, k, v, sinks, window)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)
    weight = torch.randn_like(want)
    gradients = (torch.autograd.grad((found * weight).sum(), (q, k, v, sinks)) for found in (got, want))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("masked", [False, True])
def test_padded_attention_with_sinks_is_that_of_a_loop(masked):
    q, k, v, sinks = streams()
    want, start = by_loop(q, k, v, sinks, None), 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        one = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril() if masked else None
        got = padded_attention(*one, mask, Scores(SCALE, sinks=sinks))[0]
        torch.testing.assert_close(got, want[rows], atol=1e-10, rtol=1e-8)
        start += length


class Layer(nn.Module):
    layer_idx = 0


def test_a_cache_gives_the_last_query_of_each_sequence_what_packing_gives_it():
    q, k, v, sinks = (x.detach() for x in streams())
    for window in (None, WINDOW):
        want = packed_sinks(q, k, v, Packed(LENGTHS).blocks, Scores(SCALE, window, None, sinks))
        ends = torch.tensor(LENGTHS).cumsum(0) - 1
        slots = Slots(len(LENGTHS), 32)
        kept = torch.ones(sum(LENGTHS), dtype=torch.bool)
        kept[ends] = False
        shorter = [length - 1 for length in LENGTHS]
        targets = [range(slot, slot + 1) for slot in range(len(LENGTHS))]
        before = (x[kept].transpose(0, 1)[None] for x in (q, k, v))
        slots.prefill(shorter, targets, torch.device("cpu")).attend(
            Layer(), *before, Scores(SCALE, window, None, sinks)
        )
        last = (x[ends][:, :, None] for x in (q, k, v))
        how = slots.decode(torch.tensor(shorter), torch.zeros(len(shorter), dtype=torch.bool))
        got = how.attend(Layer(), *last, Scores(SCALE, window, None, sinks))
        torch.testing.assert_close(got[:, 0], want[ends], atol=1e-10, rtol=1e-8)
