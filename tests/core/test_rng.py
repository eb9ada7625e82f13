from __future__ import annotations

import pytest
import torch

from paddock.core.rng import WORD, Stream, permutation, philox, to_unit, uniform

# Known answers published with the Random123 library, for philox4x32 with ten rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected):
    got = philox(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(int(word) for word in got) == expected


def plain_philox(counter, key):
    """The same in Python's unbounded integers."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b % 2**32, (a >> 32) ^ x3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def test_a_number_is_a_pure_function_of_seed_step_row_and_position():
    seed, step = 2**40 + 17, 12
    rows, positions = torch.tensor([[3], [2**31 + 5]]), torch.arange(4)
    got = uniform(seed, step, rows, positions, stream=Stream.RESAMPLE)
    for i, row in enumerate(rows[:, 0].tolist()):
        for position in range(4):
            high, low, *_ = plain_philox((0, position, row, step), (17, 2**8 + Stream.RESAMPLE * 2**24))
            assert got[i, position].item() == (high * 2**20 + low // 2**12 + 0.5) / 2**52


def test_neither_order_nor_batch_size_changes_the_numbers():
    rows = torch.randperm(50)
    whole = uniform(1, 2, rows[:, None], torch.arange(9))
    assert torch.equal(whole[7:8], uniform(1, 2, rows[7:8, None], torch.arange(9)))
    assert torch.equal(whole.flip(0), uniform(1, 2, rows.flip(0)[:, None], torch.arange(9)))


def test_every_coordinate_changes_the_number():
    row = torch.tensor([3])
    draws = [
        uniform(1, 2, row, 4),
        uniform(9, 2, row, 4),
        uniform(1 + 2**32, 2, row, 4),
        uniform(1, 9, row, 4),
        uniform(1, 2, row + 1, 4),
        uniform(1, 2, row, 9),
        uniform(1, 2, row, 4, stream=Stream.SHUFFLE),
    ]
    assert len({draw.item() for draw in draws}) == len(draws)


def test_numbers_are_uniform_inside_the_open_interval():
    draws = uniform(0, 0, torch.arange(400)[:, None], torch.arange(500)).flatten()
    assert draws.dtype == torch.float64
    assert draws.min() > 0 and draws.max() < 1
    counts = torch.histc(draws, bins=100, min=0, max=1)
    expected = len(draws) / 100
    assert 60 < ((counts - expected) ** 2 / expected).sum() < 150  # chi-square, 99 degrees of freedom
    neighbours = torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]
    assert abs(neighbours) < 0.01


def test_the_extreme_words_stay_inside_the_interval():
    ends = torch.tensor([0, WORD])
    low, high = to_unit(ends, ends)
    assert low > 0 and high < 1


def test_permutations_are_complete_and_differ_by_seed_and_epoch():
    first = permutation(1000, seed=1, epoch=0)
    assert sorted(first.tolist()) == list(range(1000))
    assert torch.equal(first, permutation(1000, seed=1, epoch=0))
    assert not torch.equal(first, permutation(1000, seed=1, epoch=1))
    assert not torch.equal(first, permutation(1000, seed=2, epoch=0))


@pytest.mark.gpu
def test_a_gpu_draws_the_same_bits():
    rows, positions = torch.arange(1000)[:, None], torch.arange(64)
    drawn = uniform(7, 3, rows.to("cuda"), positions.to("cuda"))
    assert torch.equal(drawn.cpu(), uniform(7, 3, rows, positions))
