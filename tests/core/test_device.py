"""What the rest of the house asks of a device."""

from __future__ import annotations

import mmap
import os
import pickle
import random
from types import SimpleNamespace
from typing import Any

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
    monkeypatch.setattr(module, "multiplies_bf16", lambda: flags)
    assert compute_dtype("bf16", CPU) == compute_dtype("bfloat16", CPU) == expected
    assert compute_dtype("bf16", torch.device("cuda")) == torch.bfloat16
    assert compute_dtype("fp32", CPU) == torch.float32


def test_full_determinism_is_asked_of_torch_and_of_the_vendor(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOSE_MATMUL_K_SHIFT", "0")  # the user's
    try:
        module.make_deterministic(torch.device("cpu"))
        assert torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        module.make_deterministic(torch.device("cuda"))
        npu: Any = SimpleNamespace(type="npu")  # torch has no such device without torch_npu
        module.make_deterministic(npu)
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
        assert os.environ.pop("HCCL_DETERMINISTIC") == "true" and os.environ["CLOSE_MATMUL_K_SHIFT"] == "0"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_shared_tensor_is_opened_by_its_reader_alone(monkeypatch):
    """A process between sender and reader may have no device."""
    monkeypatch.setattr(module, "reduce_tensor", lambda tensor: (opened, (tensor.tolist(),)))
    OPENED.clear()
    sent = module.SharedTensor(torch.tensor([1.0, 2.0]))
    handed_on = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(sent))))
    assert OPENED == [] and handed_on.tensor is None and sent.tensor is not None
    assert torch.equal(handed_on.open(), torch.tensor([1.0, 2.0])) and OPENED == [[1.0, 2.0]]


OPENED: list[list[float]] = []


def opened(numbers: list[float]) -> torch.Tensor:
    OPENED.append(numbers)
    return torch.tensor(numbers)
