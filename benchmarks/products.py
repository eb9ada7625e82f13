"""Matrix products of a decode step on a GPU, beside the device's data sheet and beside a large square product.

python benchmarks/products.py                      # every shape of gpu_step.py, as many rows as its rollout has
python benchmarks/products.py --shape qwen2.5-7b --rows 1024

Columns are TFLOP/s: as torch multiplies by default, by cuBLASLt, and with the weights laid out the other way. A graph
runs several layers with weights of their own, as a step does. `all` is a layer's products and its share of the head,
by the time that they take together; `square` is what the same device reaches with three matrices of 8,192 x 8,192.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from bound import speed_of
from cpu_step import Case
from decode_attention import seconds
from gpu_step import SHAPES
from torch import Tensor

LAYERS = 8
SQUARE = 8192
WAYS = ("default", "cublaslt", "transposed") if torch.backends.cuda.is_built() else ("default", "transposed")
Size = tuple[int, int]
"""Numbers that come in and out for each row."""


def products_of(case: Case) -> dict[str, Size]:
    """Returns the products of a layer, those of one input joined, and the head."""
    shape = case.shape
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    dim = shape.get("head_dim", hidden // heads)
    rows = heads + 2 * shape["num_key_value_heads"]
    inner = shape["intermediate_size"]
    return {"query, key, value": (hidden, rows * dim), "output": (heads * dim, hidden), "gate, up": (hidden, 2 * inner),
            "down": (inner, hidden), "head": (hidden, shape["vocab_size"])}  # fmt: skip


@contextmanager
def library(way: str) -> Iterator[None]:
    """Products in the block are computed by cuBLASLt if the way is that one."""
    if way != "cublaslt":
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def product(size: Size, rows: int, layers: int, way: str, device: torch.device) -> Callable[[], list[Tensor]]:
    wide, narrow = (size[1], size[0]) if way != "transposed" else size, (rows, size[0])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = [torch.randn(wide, device=device, dtype=dtype) for _ in range(layers)]
    values = torch.randn(narrow, device=device, dtype=dtype)
    return partial(multiplied, values, [w.T for w in weights] if way != "transposed" else weights)


def multiplied(values: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [values @ weight for weight in weights]


def took(size: Size, rows: int, layers: int, way: str, device: torch.device, turns: int) -> float:
    """Returns the seconds of one product."""
    with library(way):
        return seconds(product(size, rows, layers, way, device), device, turns) / layers


def measure(name: str, case: Case, rows: int, device: torch.device, turns: int) -> None:
    layers = case.shape["num_hidden_layers"]
    spent, counted = dict.fromkeys(WAYS, 0.0), 0.0
    for kind, size in products_of(case).items():
        head = kind == "head"
        times = {way: took(size, rows, 1 if head else LAYERS, way, device, turns) for way in WAYS}
        operations = 2.0 * rows * size[0] * size[1]
        print(f"| {name} | {kind} | {rows} x {size[0]} -> {size[1]} | {cells(operations, times)} |", flush=True)
        counted += operations / layers if head else operations
        spent = {way: spent[way] + (seconds / layers if head else seconds) for way, seconds in times.items()}
    print(f"| {name} | all | {rows} | {cells(counted, spent)} |", flush=True)


def cells(operations: float, times: dict[str, float]) -> str:
    return " | ".join(f"{operations / times[way] / 1e12:.4g}" for way in WAYS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="one of them; unset: all but the smallest")
    parser.add_argument("--rows", type=int, help="sequences of a decode step, instead of the shape's own number")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    side = SQUARE if device.type == "cuda" else 64
    square = {way: took((side, side), side, 1, way, device, args.turns) for way in WAYS}
    sheet = speed_of(device).flops / 1e12
    print(f"TFLOP/s; the data sheet has {sheet:,.0f}\n| shape | product | rows | {' | '.join(WAYS)} |")
    print(f"|{'---|' * (3 + len(WAYS))}\n| square | | {side} x {side} -> {side} | {cells(2.0 * side**3, square)} |")
    for name in [args.shape] if args.shape else [name for name in SHAPES if name != "smallest"]:
        case = SHAPES[name]
        measure(name, case, args.rows or case.prompts * case.n, device, args.turns)


if __name__ == "__main__":
    main()
