"""A CPU's own kernels beside torch's operations for the same work, in one process and in turns.

python benchmarks/cpu_kernels.py --threads 2

Shapes are those of a micro-batch and of a decode step of the 3M-parameter model of cpu_step.py, in bf16; attention in
training is also shown for longer sequences, where products on a matrix unit catch up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paddock.engines.rollout.base import Request
from paddock.engines.rollout.embedded.pool import TokenPool
from paddock.engines.rollout.embedded.slots import Slots
from paddock.kernels import native
from paddock.models.attention import Scores, SharedPrompts
from paddock.models.attention.blocks import BlockAttention
from paddock.models.attention.pool_attention import PoolDecode
from paddock.models.attention.short_attention import ShortAttention
from paddock.models.fused.passes import add_norm, add_norm_backward, gated, gated_backward, rotary, rotary_backward

TOKENS, HIDDEN, INNER, HEADS, KEYS, DIM = 1280, 256, 704, 4, 2, 64


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


@contextmanager
def by_torch() -> Iterator[None]:
    own, native.can_run = native.can_run, lambda *_: False
    try:
        yield
    finally:
        native.can_run = own


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(name: str, compiled: Callable[[], object], plain: Callable[[], object], turns: int) -> None:
    times: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        times[0].append(seconds(compiled))
        with by_torch():
            times[1].append(seconds(plain))
    own, other = (statistics.median(found[1:]) * 1e3 for found in times)
    print(f"| {name} | {own:.3f} | {other:.3f} | {other / own:.1f} x |", flush=True)


class Layer:
    layer_idx = 0


def passes(turns: int) -> None:
    x, weight, scale = numbers(TOKENS, HIDDEN), numbers(HIDDEN).requires_grad_(), torch.rand(TOKENS)
    wide, both, inner = x.float(), numbers(TOKENS, 2 * INNER), numbers(TOKENS, INNER)
    qkv, turn = numbers(TOKENS, (HEADS + 2 * KEYS) * DIM), numbers(2, TOKENS, DIM).unbind()
    heads = [numbers(TOKENS, count, DIM) for count in (HEADS, KEYS, KEYS)]
    with torch.no_grad():
        for name, work in {
            "norm": lambda: add_norm(wide, x, weight, 1e-6, False, x.dtype),
            "norm, backward": lambda: add_norm_backward(x, wide, wide, weight, scale, False, x.dtype),
            "gate": lambda: gated(both, "silu"),
            "gate, backward": lambda: gated_backward(inner, both, "silu"),
            "rotation": lambda: rotary(qkv, *turn, None, KEYS, DIM),
            "rotation, backward": lambda: rotary_backward(*heads, None, *turn, None),
        }.items():
            compare(name, work, work, turns)


def decode(turns: int, prompts: int = 32, each: int = 8, prompt: int = 20, answer: int = 32) -> None:
    """One query a row, over a prompt and half an answer."""
    rows = prompts * each
    query, key, value = (numbers(rows, heads, 1, DIM) for heads in (HEADS, KEYS, KEYS))
    pool, slots = TokenPool(rows, prompts * prompt, 2 * answer, torch.device("cpu")), Slots(rows, prompt + 2 * answer)
    pool.admit([Request(list(range(prompt)), list(range(each)), list(range(each)), 0, answer) for _ in range(prompts)])
    lengths, nobody = torch.full((rows,), prompt + answer), torch.zeros(rows, dtype=torch.bool)

    def attend(how: PoolDecode | object) -> Tensor:
        return how.attend(Layer(), query, key, value, Scores(DIM**-0.5))  # type: ignore[attr-defined]

    with torch.no_grad():
        compare("attention of a decode step", lambda: attend(pool.decode(lengths, nobody)),
                lambda: attend(slots.decode(lengths, nobody)), turns)  # fmt: skip


def training(turns: int, prompt: int, answer: int, each: int) -> None:
    how = SharedPrompts(
        [prompt] * max(1, TOKENS // (each * answer)), [[answer] * each] * max(1, TOKENS // (each * answer))
    )
    total = sum(how.lengths)
    q, k, v = (numbers(total, heads, DIM).requires_grad_() for heads in (HEADS, KEYS, KEYS))
    grad, scale = numbers(total, HEADS, DIM), DIM**-0.5

    def own() -> None:
        torch.autograd.grad(ShortAttention.apply(q, k, v, how.prompt_groups, scale), (q, k, v), grad)

    def blocks() -> None:
        torch.autograd.grad(BlockAttention.apply(q, k, v, how.blocks, Scores(scale)), (q, k, v), grad)

    compare(f"attention and back, {total} tokens, {prompt} + {answer} a row", own, blocks, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not native.can_run(torch.zeros(1)):
        raise SystemExit("there is no C++ compiler here, and so there is nothing to compare")
    print(f"torch {torch.__version__}, {args.threads} thread(s), bf16, medians of {args.turns - 1} in turns, in ms")
    print("| work | own | torch | |\n|---|---|---|---|")
    passes(args.turns)
    decode(args.turns)
    for prompt, answer, each in ((20, 64, 8), (100, 128, 8), (60, 200, 4), (100, 400, 4), (200, 800, 2)):
        training(args.turns, prompt, answer, each)


if __name__ == "__main__":
    main()
