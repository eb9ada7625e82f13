"""Not torch_npu: torch's out-of-tree device under the name npu, whose memory is the host's (see device.cpp).

It is imported where torch_npu would be, and gives torch what that gives: a device, `torch.npu`, and a fused attention.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

torch.ops.load_library(os.environ["PADDOCK_STANDIN"])
torch.utils.rename_privateuse1_backend("npu")
torch.ops.standin.ready()

DEVICE = torch.device("npu", 0)
streams: list[str] = []
"""What was asked of streams, in order."""
attended: list[list[int]] = []
"""Where the sequences of each call of the fused attention ended."""


def stream(_: Any) -> AbstractContextManager[None]:
    streams.append("beside")
    return nullcontext()


npu = ModuleType("torch.npu")
vars(npu).update(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda device: None,
    manual_seed_all=lambda seed: None,
    synchronize=lambda device=None: None,
    empty_cache=lambda: None,
    memory_allocated=lambda device=None: torch.ops.standin.held_now(),
    max_memory_allocated=lambda device=None: torch.ops.standin.held_most(),
    reset_peak_memory_stats=lambda device=None: torch.ops.standin.forget_most(),
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=64 << 30, multi_processor_count=24),
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    Event=lambda: torch.Event(device=DEVICE),
    Stream=lambda device=None: torch.Stream(device=DEVICE),
    current_stream=lambda device=None: torch.Stream(device=DEVICE),
    stream=stream,
)
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    *,
    input_layout: str,
    atten_mask: torch.Tensor,
    scale: float,
    keep_prob: float,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    sparse_mode: int,
) -> tuple[torch.Tensor, ...]:
    """As documented for layout TND and sparse mode 3: a causal pattern of 2048 x 2048 for sequences that end there."""
    assert (input_layout, keep_prob, sparse_mode) == ("TND", 1.0, 3) and actual_seq_qlen == actual_seq_kvlen
    assert atten_mask.shape == (2048, 2048) and bool(atten_mask[0, 1]) and not bool(atten_mask[1, 0])
    assert head_num == query.shape[1] and query.dtype in (torch.bfloat16, torch.float16)
    attended.append(actual_seq_qlen)
    parts = []
    for start, end in zip([0, *actual_seq_qlen], actual_seq_qlen, strict=False):
        q, k, v = (x[start:end].transpose(0, 1).float() for x in (query, key, value))
        k, v = (x.repeat_interleave(head_num // x.shape[0], 0) for x in (k, v))
        hidden = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
    return (torch.cat(parts),)
