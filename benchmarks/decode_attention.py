"""Attention of one layer in a decode step on a GPU, where each answer reads its prompt alone and where a group reads it
together, beside the least time that reading the same bytes takes at the bandwidth of the device's data sheet.

python benchmarks/decode_attention.py

Rows are in random order, as sequences are that took the slots of finished ones; answers have 0 to `answer` tokens,
uniformly. A graph runs several layers with keys and values of their own, as a step does, so that what one has read is
not in the cache for the next. `grouping` is what a step does once to find rows with one prompt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from bound import speed_of
from torch import Tensor

from paddock.core.device import Recording, can_record, synchronize
from paddock.kernels.arguments import Pieces, Scores
from paddock.kernels.decode import decode_attention, rows_by_prompt

LAYERS = 8
REPLAYS = 10  # of a graph between two waits for the device


@dataclass(frozen=True)
class Shape:
    heads: int
    keys: int
    dim: int
    rows: int
    prompt: int
    answer: int
    each: int = 8
    """Answers to a prompt."""


SHAPES = {
    "qwen2.5-0.5b": Shape(14, 2, 64, 1024, 120, 256),
    "smollm2-135m": Shape(9, 3, 64, 1024, 120, 256),
    "qwen2.5-1.5b": Shape(12, 2, 128, 1024, 120, 256),
    "qwen2.5-7b": Shape(28, 4, 128, 512, 120, 256),
    "qwen3-1.7b": Shape(16, 8, 128, 1024, 120, 256),
    "qwen3-8b": Shape(32, 8, 128, 512, 120, 256),
    "qwen2.5-0.5b, long": Shape(14, 2, 64, 256, 2048, 256),
    "smallest": Shape(2, 1, 16, 2, 70, 20, 2),
}


def pieces_of(shape: Shape, device: torch.device) -> Pieces:
    """Returns rows of a pool: prompts, then a stretch for each answer."""
    rows, place = torch.arange(shape.rows), torch.randperm(shape.rows)
    prompt = rows // shape.each * shape.prompt
    answer = shape.rows // shape.each * shape.prompt + rows * (shape.answer + 1)
    length = shape.prompt + torch.randint(shape.answer + 1, (shape.rows,))
    whole = torch.full_like(rows, shape.prompt)
    prompt, whole, answer, length = (column[place].to(device) for column in (prompt, whole, answer, length))
    return Pieces(prompt.int(), whole.int(), answer.int(), length)


def least_bytes(shape: Shape, pieces: Pieces, size: int, together: bool) -> int:
    """Returns the bytes of keys, values, queries and outputs of a layer; of a prompt once a group, or once a row."""
    prompts = shape.rows // shape.each if together else shape.rows
    tokens = prompts * shape.prompt + int((pieces.length + 1 - pieces.prompt_length).sum())
    return size * shape.dim * (2 * tokens * shape.keys + 2 * shape.rows * shape.heads)


def seconds(work: Callable[[], object], device: torch.device, turns: int) -> float:
    """Returns the median time of the work, after a first run that compiles; on a GPU it is replayed as a graph."""

    def step() -> None:
        work()

    step()
    run, repeats = (Recording().record(step), REPLAYS) if can_record(device) else (step, 1)
    times = []
    for _ in range(turns):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def measure(name: str, shape: Shape, device: torch.device, turns: int) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # triton's interpreter multiplies no bfloat16
    alone = pieces_of(shape, device)
    together = replace(alone, by_prompt=rows_by_prompt(alone))
    tokens = int(alone.answer.max()) + shape.answer + 1
    layers = [torch.randn(2, tokens, shape.keys, shape.dim, device=device, dtype=dtype) for _ in range(LAYERS)]
    q = torch.randn(shape.rows, shape.heads, shape.dim, device=device, dtype=dtype)

    def step(pieces: Pieces) -> list[Tensor]:
        return [decode_attention(q, *layer, pieces, Scores(shape.dim**-0.5)) for layer in layers]

    off = max(float((a - b).norm() / b.norm()) for a, b in zip(step(together), step(alone), strict=True))
    assert off < 1e-2, f"they differ by {off:.1e}"
    took = [seconds(lambda p=pieces: step(p), device, turns) / LAYERS for pieces in (alone, together)]
    grouping = seconds(lambda: [rows_by_prompt(alone) for _ in layers], device, turns) / LAYERS
    bandwidth = speed_of(device).bandwidth
    bounds = [least_bytes(shape, alone, dtype.itemsize, shared) / bandwidth for shared in (False, True)]
    cells = [took[0], bounds[0], took[1], bounds[1], grouping]
    print(
        f"| {name} | " + " | ".join(f"{cell * 1e6:.1f}" for cell in cells) + f" | {took[0] / took[1]:.2f} x |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="one of them; unset: all but the smallest")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    print("microseconds of a layer, medians")
    print("| shape | alone | its bound | together | its bound | grouping | |\n|---|---|---|---|---|---|---|")
    for name in [args.shape] if args.shape else [name for name in SHAPES if name != "smallest"]:
        measure(name, SHAPES[name], torch.device(args.device), args.turns)


if __name__ == "__main__":
    main()
