"""Kernels between the products of an update on a GPU, beside the least time that reading and writing their numbers
takes at the bandwidth of the device's data sheet.

python benchmarks/passes.py                                # the shapes of gpu_step.py, 40,000 tokens
python benchmarks/passes.py --shape qwen2.5-7b --tokens 16384

Norms with the sum before them, gates, rotations, and keys of prompts that eight responses share: forward and backward.
The stream between layers is float32, all else bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from bound import speed_of
from cpu_step import Case
from decode_attention import seconds
from gpu_step import SHAPES
from torch import Tensor

from paddock.models.attention.shared_prompts import Repeated, SharedPrompts
from paddock.models.fused.passes import (
    add_norm,
    add_norm_backward,
    gated,
    gated_backward,
    rotary,
    rotary_backward,
)

COPIES = 4
PROMPT, EACH = 120, 8
Measured = tuple[str, Callable[[], object], int]
"""Name, work, and the bytes that it reads and writes."""


def size_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def work_of(case: Case, tokens: int, device: torch.device) -> Iterator[Measured]:
    """Yields the kernels of a layer of this shape."""
    dtype, shape = torch.bfloat16 if device.type == "cuda" else torch.float32, case.shape
    normal = partial(torch.randn, device=device)
    hidden, heads, keys = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    dim, inner = shape.get("head_dim", hidden // heads), shape["intermediate_size"]

    stream, branch, weight = normal(tokens, hidden), normal(tokens, hidden, dtype=dtype), normal(hidden, dtype=dtype)
    weight.requires_grad_()
    y, total, scale = add_norm(stream, branch, weight, 1e-6, False, dtype)
    yield "norm", partial(add_norm, stream, branch, weight, 1e-6, False, dtype), size_of(stream, branch, y, total)
    back = partial(add_norm_backward, y, stream, total, weight, scale, False, dtype)
    yield "norm, back", back, size_of(y, stream, total, *back()[:2])

    both, dout = normal(tokens, 2 * inner, dtype=dtype), normal(tokens, inner, dtype=dtype)
    yield "gate", partial(gated, both, "silu"), size_of(both, dout)
    yield "gate, back", partial(gated_backward, dout, both, "silu"), 2 * size_of(both, dout)

    qkv, cos = normal(tokens, (heads + 2 * keys) * dim, dtype=dtype), normal(tokens, dim, dtype=dtype)
    q, k, v = rotary(qkv, cos, cos, None, keys, dim)
    yield "rotation", partial(rotary, qkv, cos, cos, None, keys, dim), size_of(qkv, qkv, cos, cos)
    turned = partial(rotary_backward, q, k, v, None, cos, cos, None)
    yield "rotation, back", turned, size_of(qkv, qkv, cos, cos)

    answer = case.new_tokens - 1
    groups = tokens // (PROMPT + EACH * answer)
    how = SharedPrompts([PROMPT] * groups, [[answer] * EACH] * groups, device)
    own = sum(how.lengths)
    copied = Repeated.apply(k[:own].requires_grad_(), v[:own].requires_grad_(), how)
    yield "shared keys", partial(Repeated.apply, k[:own], v[:own], how), size_of(k[:own], v[:own], *copied)
    grads = [torch.randn_like(part) for part in copied]
    summed = partial(Repeated.backward, copied[0].grad_fn, *grads)
    yield "shared keys, back", summed, size_of(*grads, k[:own], v[:own])


def measure(name: str, case: Case, tokens: int, device: torch.device, turns: int) -> None:
    bandwidth = speed_of(device).bandwidth
    for kind, work, size in work_of(case, tokens, device):

        def several(work: Callable[[], object] = work) -> None:
            for _ in range(COPIES):
                work()

        with torch.no_grad():
            took = seconds(several, device, turns) / COPIES
        least = size / bandwidth
        print(f"| {name} | {kind} | {took * 1e6:.1f} | {least * 1e6:.1f} | {least / took:.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="one of them; unset: all but the smallest")
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    print("microseconds of a layer, medians\n| shape | kernel | time | bound | |\n|---|---|---:|---:|---:|")
    for name in [args.shape] if args.shape else [name for name in SHAPES if name != "smallest"]:
        measure(name, SHAPES[name], args.tokens, torch.device(args.device), args.turns)


if __name__ == "__main__":
    main()
