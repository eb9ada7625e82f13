"""What megatron-core asks of CUDA, answered for a CPU: the current device, random numbers, and a stream for copies."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from devices import DEVICE


class NoStream:
    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> Any:
        return self

    def synchronize(self) -> None: ...


def patch() -> None:
    if DEVICE.type != "cpu":
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    stream = NoStream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = torch.cuda.Stream = lambda: stream
    torch.cuda.stream = nullcontext
    random.CudaRNGStatesTracker.fork = lambda self, *name: nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1)
    random._set_cuda_rng_state = lambda *_, **__: None
    token_dispatcher.maybe_move_tensor_to_cpu = as_host_numbers


def as_host_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
