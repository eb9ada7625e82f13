"""What the rest of the house asks of a device."""

from __future__ import annotations

import mmap
import random

import numpy
import pytest
import torch

import paddock.core.device as module
from paddock.core.device import (
    compute_dtype,
    device_of,
    device_type,
    empty_cache,
    memory_in_use,
    peak_memory,
    reset_peak_memory,
    seed_all,
    synchronize,
)
from paddock.errors import UserError

CPU = torch.device("cpu")


def test_the_device_is_the_one_that_is_there():
    assert device_of().type == device_type()
    assert device_of("cpu") == CPU


def test_a_device_that_is_not_there_is_refused():
    missing = next(kind for kind in ("cuda", "npu") if kind != device_type())
    with pytest.raises(UserError, match=f"trainer.device={missing}: this process sees no {missing} device"):
        device_of(missing)


def test_the_peak_rises_with_what_is_held_and_can_be_reset():
    before = memory_in_use(CPU)
    block = mmap.mmap(-1, 200_000_000)
    block.write(bytes(200_000_000))
    peak = peak_memory(CPU)
    assert peak > before + 150_000_000
    block.close()
    reset_peak_memory(CPU)
    assert peak_memory(CPU) < peak - 100_000_000
    synchronize(CPU)
    empty_cache(CPU)


def test_one_seed_fixes_every_generator():
    draws = []
    for _ in range(2):
        seed_all(7)
        draws.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]


@pytest.mark.parametrize(("flags", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_computes_in_bf16_only_if_it_can_multiply_in_it(monkeypatch, flags, expected):
    monkeypatch.setattr(module, "cpu_multiplies_bf16", lambda: flags)
    assert compute_dtype("bf16", CPU) == compute_dtype("bfloat16", CPU) == expected
    assert compute_dtype("bf16", torch.device("cuda")) == torch.bfloat16
    assert compute_dtype("fp32", CPU) == torch.float32
