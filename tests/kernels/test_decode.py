"""Decode attention equals a slow loop over each row's tokens, whether rows read a prompt together or each by itself."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from interpreted import DEVICE, INTERPRETED, NARROW, cases, on_gpu
from torch import Tensor

from paddock.kernels import decode
from paddock.kernels.arguments import Pieces, Scores

SCALE, ANSWER = 0.3, 150
SIZES = {1: 65, 5: 63, 3: 1, 2: 130} if INTERPRETED else {1: 65, 17: 63, 3: 1, 8: 200, 2: 64}
"""Rows that share a prompt, and its tokens."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def slow(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One row after the other, in float64."""
    group, found = q.shape[1] // keys.shape[1], []
    for row, (prompt, prompt_length, answer, length) in enumerate(columns.t().tolist()):
        index = [prompt + j if j < prompt_length else answer + j - prompt_length for j in range(length + 1)]
        key, value = (x[index].double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[row].double(), key) * SCALE
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        if window is not None:
            scores[:, : max(0, length + 1 - window)] = -torch.inf
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
        found.append(torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : length + 1], value))
    return torch.stack(found)


def pieces_of(columns: Tensor) -> Pieces:
    return Pieces(*columns[:3].int(), columns[3].contiguous())


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Row by row, so that no row hides behind the others."""
    off = (found.double() - wanted).flatten(1).norm(dim=1)
    assert (off <= tolerance * wanted.flatten(1).norm(dim=1) + 1e-7).all(), off


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window,cap", cases((70, 2.0), on_gpu=[(None, None), (5, None), (None, 3.0)]))
def test_decode_attends_to_prompt_and_answer_and_to_nothing_else(monkeypatch, splits, window, cap):
    monkeypatch.setattr(decode, "splits_of", lambda *_: splits)
    q, (keys, values) = torch.randn(6, 6, 16, device=DEVICE), torch.randn(2, 3000, 2, 16, device=DEVICE)
    columns = torch.tensor([[0, 0, 100, 100, 300, 500], [70, 70, 3, 3, 150, 64], [1000, 1200, 1400, 1600, 1800, 2000],
                            [70, 100, 3, 140, 190, 128]], device=DEVICE)  # fmt: skip
    found = decode.decode_attention(q, keys, values, pieces_of(columns), Scores(SCALE, window, cap))
    close(found, slow(q, keys, values, columns, window, cap, None), 1e-5)


def groups(sizes: dict[int, int]) -> Tensor:
    """Columns of rows in random order: answers of 0 to 149 tokens, the last of each larger group finished (length 0),
    and two rows that stand for nothing, beside prompts that begin where theirs did."""
    starts, lasts = (torch.tensor([0, *counts]).cumsum(0).tolist() for counts in (sizes.values(), sizes))
    rows = [prompt for size, *prompt in zip(sizes, starts, sizes.values(), strict=False) for _ in range(size)]
    total, slots, drawn = starts[-1], torch.randperm(len(rows)).tolist(), torch.randint(ANSWER, (len(rows),)).tolist()
    found = [
        (start, tokens, total + slot * ANSWER, tokens + more)
        for (start, tokens), slot, more in zip(rows, slots, drawn, strict=True)
    ]
    for last, size in zip(lasts[1:], sizes, strict=True):
        if size > 2:
            found[last - 1] = (*found[last - 1][:3], 0)
    scratch = total + len(rows) * ANSWER
    found += [(0, 0, scratch, 0), (starts[3], 0, scratch, 0)]
    return torch.tensor(found, device=DEVICE)[torch.randperm(len(found))].t().contiguous()


def test_rows_are_grouped_by_where_their_prompt_begins_and_by_its_length():
    columns = groups(SIZES)
    order, first, last = decode.rows_by_prompt(pieces_of(columns)).tolist()
    assert sorted(order) == list(range(columns.shape[1])), "each row has a place"
    names = [tuple(columns[:2, row].tolist()) for row in order]
    assert names == sorted(names)
    for place, name in enumerate(names):
        assert (first[place], last[place]) == (names.index(name), names.index(name) + names.count(name))


@pytest.mark.parametrize("rows", cases(65, on_gpu=[1, 64, 300]))
def test_any_number_of_rows_is_grouped(rows):
    prompts = torch.randint(max(1, rows // 8), (rows,), device=DEVICE)
    columns = torch.stack([prompts, prompts + 5, prompts, prompts])
    order, first, last = decode.rows_by_prompt(pieces_of(columns)).long()
    assert torch.equal(order, prompts.argsort(stable=True))
    ordered = prompts[order]
    assert torch.equal(first, torch.searchsorted(ordered, ordered))
    assert torch.equal(last, torch.searchsorted(ordered, ordered, right=True))


CASES = cases(
    # group, dtype, splits, window, cap, sunk
    (3, torch.float32, 4, 20, 2.0, True),
    (7, NARROW, 1, None, None, False),
    on_gpu=[
        (1, torch.float32, 1, None, None, False),
        (3, torch.float32, 1, None, None, False),
        (7, torch.float32, 4, None, None, True),
        (8, torch.float32, 1, 90, None, False),
        (7, torch.float32, 1, None, 3.0, True),
        (1, NARROW, 4, 130, None, False),
        (3, NARROW, 1, None, 3.0, False),
        (7, NARROW, 4, 20, None, True),
        (8, NARROW, 4, None, None, False),
    ],
)


@pytest.mark.parametrize("group,dtype,splits,window,cap,sunk", CASES)
def test_a_prompt_that_rows_read_together_gives_each_what_it_would_read_alone(
    monkeypatch, group, dtype, splits, window, cap, sunk
):
    monkeypatch.setattr(decode, "splits_of", lambda *_: splits)
    monkeypatch.setattr(decode, "LEAST", decode.BLOCK)  # prompts of one to four parts
    columns, heads = groups(SIZES), 2 if group == 3 else 1
    q = torch.randn(columns.shape[1], group * heads, 16, device=DEVICE).to(dtype)
    keys, values = torch.randn(2, int(columns[2].max()) + ANSWER, heads, 16, device=DEVICE).to(dtype)
    sinks = torch.randn(group * heads, device=DEVICE) if sunk else None
    pieces, scores = pieces_of(columns), Scores(SCALE, window, cap, sinks)
    alone = decode.decode_attention(q, keys, values, pieces, scores)
    pieces = replace(pieces, by_prompt=decode.rows_by_prompt(pieces))
    together = decode.decode_attention(q, keys, values, pieces, scores)
    wanted = slow(q, keys, values, columns, window, cap, sinks)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    close(alone, wanted, tolerance)
    close(together, wanted, tolerance)


def test_a_tile_reads_its_prompt_and_nothing_else():
    """What lies beside the tokens of a row is never read: it may be anything."""
    columns = groups({8: 70, 3: 5, 1: 9, 2: 130})
    q = torch.randn(columns.shape[1], 3, 16, device=DEVICE)
    keys, values = torch.randn(2, int(columns[2].max()) + ANSWER, 1, 16, device=DEVICE)
    seen = torch.zeros(len(keys), dtype=torch.bool)
    for prompt, prompt_length, answer, length in columns.t().tolist():
        seen[prompt : prompt + min(prompt_length, length + 1)] = True
        seen[answer : answer + max(0, length + 1 - prompt_length)] = True
    keys[~seen], values[~seen] = torch.nan, torch.nan
    pieces = pieces_of(columns)
    pieces = replace(pieces, by_prompt=decode.rows_by_prompt(pieces))
    found = decode.decode_attention(q, keys, values, pieces, Scores(SCALE))
    close(found, slow(q, keys, values, columns, None, None, None), 1e-5)


@pytest.mark.parametrize("window", cases(40, on_gpu=[None]))
def test_exact_attention_is_the_same_bits_whether_prompts_are_shared_or_not(window):
    columns = groups({3: 70, 2: 9, 1: 3, 4: 4})
    q = torch.randn(columns.shape[1], 2, 16, device=DEVICE)
    keys, values = torch.randn(2, int(columns[2].max()) + ANSWER, 1, 16, device=DEVICE)
    pieces = pieces_of(columns)
    alone = decode.decode_attention(q, keys, values, pieces, Scores(SCALE, window), exact=True)
    pieces = replace(pieces, by_prompt=decode.rows_by_prompt(pieces))
    assert torch.equal(decode.decode_attention(q, keys, values, pieces, Scores(SCALE, window), exact=True), alone)


@on_gpu
def test_the_script_that_measures_both_prints_its_table(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = "decode_attention.py"
    monkeypatch.setattr(sys, "argv", [script, "--shape", "smallest", "--device", DEVICE.type, "--turns", "1"])
    runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 3 and len({line.count("|") for line in table}) == 1 and "nan" not in table[2]
