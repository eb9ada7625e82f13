"""Every kernel compiles for a GPU, though none is here: triton's interpreter runs what its compiler may refuse.

Wrappers are called with tensors on the CPU, and each launch is compiled for an H100 instead of being run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from paddock.kernels.launch import INTERPRETED

if INTERPRETED:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from paddock.kernels import (
    decode,
    gated,
    launch,
    lora,
    matmul,
    norm,
    packed,
    repeat,
    rotary,
    sampling,
    statistics,
    thin,
)
from paddock.kernels.arguments import ACTIVATIONS, HeadNorm, Scores

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32",
         torch.int64: "*i64", torch.bool: "*i1"}  # fmt: skip
SHARED = 228 * 1024  # bytes of an H100's multiprocessor
MOST_SHARED = SHARED - 1024
EARLY = (decode, gated, lora, norm, rotary, thin)


def compiled(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """As a launch would: tensors by type, numbers by type, what is constant by value."""
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, arguments, strict=False)) | {k: v for k, v in named.items() if k in names}
    signature, constants = {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    options = {k: v for k, v in named.items() if k not in names}
    found = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)
    assert found.metadata.shared <= MOST_SHARED, "a launch would be refused"


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    seen: list[str] = []

    def get(kernel: Any, grid: tuple[int, ...]) -> Any:
        assert max(grid[1:], default=1) < 1 << 16, "CUDA takes more in the first direction alone"

        def instead(*arguments: Any, **named: Any) -> None:
            seen.append(kernel.__name__)
            compiled(kernel, arguments, named)

        return instead

    monkeypatch.setattr(JITFunction, "__getitem__", get)
    monkeypatch.setattr(decode, "shared_memory", lambda device: SHARED, raising=False)
    for module in EARLY:
        monkeypatch.setattr(module, "early", lambda device: {"launch_pdl": True})
    return seen


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


HEADS, KEYS, DIM, ROWS = 16, 8, 128, 40


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("exact", [False, True])
def test_attention_of_a_decode_step(launches, monkeypatch, splits, exact):
    monkeypatch.setattr(decode, "splits_of", lambda *_: splits)
    pieces = decode.Pieces(*zeros(4, ROWS, dtype=torch.int32))
    q, cache = zeros(ROWS, HEADS, DIM), zeros(100, KEYS, DIM)
    decode.decode_attention(q, cache, cache, pieces, Scores(0.1), exact)
    decode.decode_attention(q, cache, cache, pieces, Scores(0.1, 64, 30.0, None if exact else zeros(HEADS)), exact)
    assert ("join_splits" in launches) is (splits > 1 and not exact)


@pytest.mark.parametrize(
    "heads,dim,dtype,splits",
    [(14, 64, torch.bfloat16, 1), (9, 64, torch.bfloat16, 4), (4, 256, torch.bfloat16, 1), (14, 64, torch.float32, 4)],
)
def test_attention_of_a_decode_step_that_reads_prompts_together(launches, monkeypatch, heads, dim, dtype, splits):
    monkeypatch.setattr(decode, "splits_of", lambda *_: splits)
    pieces = decode.Pieces(*zeros(3, ROWS, dtype=torch.int32), zeros(ROWS, dtype=torch.int64))
    pieces = replace(pieces, by_prompt=decode.rows_by_prompt(pieces).zero_())
    q, cache = zeros(ROWS, heads, dim, dtype=dtype), zeros(100, 3 if heads == 9 else 2, dim, dtype=dtype)
    decode.decode_attention(q, cache, cache, pieces, Scores(0.1))
    decode.decode_attention(q, cache, cache, pieces, Scores(0.1, 64, 30.0, zeros(heads)))
    once = ["attend_prompts", "attend_rows"] + ["join_splits"] * (splits > 1)
    assert launches == ["order_rows", *once, *once]


@pytest.mark.parametrize("exact", [False, True])
def test_attention_of_wide_heads_in_float32(launches, exact):
    """Exact numerics compare each layer with its module in float32, whatever its weights are."""
    rows = 1 << 16
    pieces = decode.Pieces(*zeros(3, rows, dtype=torch.int32), zeros(rows, dtype=torch.int64))
    if exact:
        q, tiles = zeros(ROWS, 2, 256, dtype=torch.float32), packed.tiles_of([20, 20], torch.device("cpu"))
        packed.packed_attention(q, q, q, tiles, Scores(0.1))
    else:
        q = zeros(rows, 2, 256, dtype=torch.float32)
        decode.decode_attention(q, q[:8], q[:8], pieces, Scores(0.1))
    assert launches[0] == ("attend_tiles" if exact else "attend_rows")


def test_copies_of_keys_for_every_response(launches):
    tiles = repeat.Tiles.of([repeat.Stretch(0, 20, [0, 20]), repeat.Stretch(20, 20, [40])], 256, torch.device("cpu"))
    keys, values = repeat.repeat(zeros(ROWS, 2, 128), zeros(ROWS, 2, 128), tiles, 60)
    repeat.repeat_backward(keys, values, tiles, ROWS)
    assert launches == ["copy_tiles", "copy_tiles"]


def test_attention_of_packed_rows_with_exact_numbers(launches):
    tiles = packed.tiles_of([20, 20], torch.device("cpu"))
    q, k = zeros(ROWS, HEADS, DIM), zeros(ROWS, KEYS, DIM)
    packed.packed_attention(q, k, k, tiles, Scores(0.1))
    assert launches == ["attend_tiles"]


@pytest.mark.parametrize("norm", [None, HeadNorm(zeros(DIM), zeros(DIM), 1e-6, False)])
def test_rotation(launches, norm):
    qkv, cos = zeros(ROWS, (HEADS + 2 * KEYS) * DIM), zeros(ROWS, DIM)
    if norm:
        norm.queries.requires_grad_()
    q, k = zeros(ROWS, HEADS, DIM), zeros(ROWS, KEYS, DIM)
    rotary.rotary(qkv, cos, cos, norm, q, k, k, None)
    rotary.rotary(qkv, cos, cos, norm, q, *zeros(2, 100, KEYS, DIM), torch.arange(ROWS))
    rotary.rotary_backward(q, k, k, qkv if norm else None, cos, cos, norm)
    assert launches == ["rotate", "rotate", "rotate_backward"]


@pytest.mark.parametrize("unit", [False, True])
def test_norms(launches, unit):
    x, narrow, weight = zeros(ROWS, 1024, dtype=torch.float32), zeros(ROWS, 1024), zeros(1024).requires_grad_()
    for branch in (None, narrow, zeros(4, ROWS, 1024, dtype=torch.float32)):
        norm.add_norm(x, branch, weight, 1e-6, unit, torch.bfloat16)
    norm.add_norm_backward(narrow, x, x, weight, x[:, 0].contiguous(), unit, torch.bfloat16)
    assert launches == ["norm_rows"] * 3 + ["norm_rows_backward"]


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_gates(launches, activation):
    gated.gated(zeros(ROWS, 2048), activation)
    gated.gated_backward(zeros(ROWS, 1024), zeros(ROWS, 2048), activation)
    thin.thin_gated(zeros(ROWS, 1024), zeros(6144, 1024), activation)
    assert launches == ["gate", "gate_backward", "thin_rows"]


def test_products(launches):
    for rows in (16, 64, 256):
        thin.thin_parts(zeros(rows, 2048), zeros(1024, 2048))
    matmul.exact_linear(zeros(ROWS, 1024), zeros(512, 1024), zeros(512))
    assert launches == ["thin_rows"] * 3 + ["multiply"]


@pytest.mark.parametrize("rank", [3, 32, 256])
@pytest.mark.parametrize("keeps", [False, True])
def test_adapters(launches, rank, keeps):
    columns, scales = (slice(0, 512), slice(512, 640), slice(640, 768)), (2.0, 2.0, 0.5)
    for count in (1, 3):
        both, b = zeros(ROWS, 768 + count * rank), zeros([512, 768][count > 1], rank)
        y, u = both[:, :768], both[:, 768:]
        lora.widen(y, u, b, columns[:count], scales[:count], keeps)
        lora.narrow(y, b, columns[:count], scales[:count], u)
    assert launches == ["widen_rows", "narrow_rows"] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draws(launches, temperature):
    whole, wide = zeros(ROWS, dtype=torch.int64), zeros(ROWS, 8, dtype=torch.int64)
    columns = sampling.Draws(wide.double(), wide, wide.float(), whole, whole, whole.bool(), whole, whole[:1])
    sampling.draw(zeros(ROWS, 32000, dtype=torch.float32), columns, temperature)
    sampling.fill_uniforms(wide.double()[:, :7], zeros(3, ROWS, dtype=torch.int64), 5)
    assert launches == ["draw_rows", "number_rows"]


def test_statistics_of_logits(launches):
    logits, tokens = zeros(ROWS, 8192, dtype=torch.float32), zeros(ROWS, dtype=torch.int64)
    top, total, chosen, weighted, squared = zeros(5, ROWS, dtype=torch.float32)
    statistics.gather(logits, tokens, 0, 0.7, top, total, chosen, weighted, squared)
    statistics.gather(logits, tokens, 0, 0.7, top, total, chosen, None, None)
    statistics.normalise(top, total)
    statistics.gradient(logits, tokens, 0, 0.7, top, total, chosen, weighted, 30.0, torch.bfloat16)
    assert launches == ["gather_rows"] * 2 + ["normalise_rows", "gradient_rows"]


def test_no_kernel_is_forgotten():
    """Each file with kernels is in one of the tests above."""
    files = {path.stem for path in Path(launch.__file__).parent.glob("*.py")}
    tested = {module.__name__.rsplit(".", 1)[-1] for module in (*EARLY, matmul, packed, repeat, sampling, statistics)}
    others = {"__init__", "arguments", "choice", "compiler", "gpu", "launch", "native"}
    assert files == tested | others
