"""The kernels of cpu/, under the names and with the arguments of those for a GPU (see gpu.py).

Numbers of a call are of one type, float32 or bfloat16; the stream between layers may be float32 beside bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from paddock.kernels.arguments import ACTIVATIONS, Draws, HeadNorm, Pieces, PromptGroups, Scores
from paddock.kernels.compiler import library

CHUNK = 64  # rows of a partial sum, as in cpu/layers.h
NO_ROOM = "a CPU's kernels write rows without gaps"
TYPES = {bool: ctypes.c_bool, int: ctypes.c_long, float: ctypes.c_float}


def can_run(*tensors: Tensor | None) -> bool:
    dtypes = {(x.dtype, x.device.type) for x in tensors if x is not None}
    return dtypes in ({(torch.float32, "cpu")}, {(torch.bfloat16, "cpu")}) and library() is not None


@cache
def kernel(name: str, dtype: torch.dtype, stream: torch.dtype, types: tuple[type, ...]) -> Callable[..., None]:
    opened = library()
    assert opened is not None
    opened.find.restype, opened.find.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_bool, ctypes.c_bool)
    address = opened.find(name.encode(), dtype == torch.bfloat16, stream == torch.bfloat16)
    assert address, f"cpu/kernels.cpp has no {name}"
    return ctypes.CFUNCTYPE(None, *types)(address)


def call(
    name: str, dtype: torch.dtype, *arguments: Tensor | float | bool | None, stream: torch.dtype = torch.float32
) -> None:
    """Calls the C++ kernel `name`. Tensors are passed as data pointers, None as a null pointer."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    assert all(x.is_contiguous() and x.device.type == "cpu" for x in tensors), f"{name} reads rows without gaps"
    types = tuple(TYPES.get(type(argument), ctypes.c_void_p) for argument in arguments)
    pointers = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
    kernel(name, dtype, stream, types)(*pointers)


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, unit: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    y, scale = torch.empty_like(x, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)
    total = x if branch is None else torch.empty_like(x)
    call("add_norm", dtype, x, branch, weight, y, total, scale, *x.shape, eps, unit, stream=x.dtype)
    return y, total, scale


def add_norm_backward(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor, unit: bool, branch_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, columns = total.shape
    dx = torch.empty_like(total)
    dbranch = None if branch_dtype == total.dtype else torch.empty_like(total, dtype=branch_dtype)
    parts = torch.empty(-(-rows // CHUNK), columns) if weight.requires_grad else None
    call("add_norm_backward", weight.dtype, dy, dsum, total, weight, scale, dx, dbranch, parts, rows, columns, unit,
         stream=total.dtype)  # fmt: skip
    return dx, dx if dbranch is None else dbranch, None if parts is None else parts.sum(0).to(weight.dtype)


def gated(both: Tensor, activation: str) -> Tensor:
    out = both.new_empty(len(both), both.shape[1] // 2)
    call("gated", both.dtype, both, out, *out.shape, ACTIVATIONS[activation])
    return out


def gated_backward(dout: Tensor, both: Tensor, activation: str, room: int = 0) -> tuple[Tensor, Tensor]:
    assert not room, NO_ROOM
    dboth, out = torch.empty_like(both), torch.empty_like(dout)
    call("gated_backward", both.dtype, dout, both, dboth, out, *dout.shape, ACTIVATIONS[activation])
    return dboth, out


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm | None, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None
) -> None:
    assert place is None or place.dtype == torch.int64
    (queries, dim), keys = q.shape[1:], k.shape[1]
    call("rotary", qkv.dtype, qkv, cos, sin, *weights(norm), q, k, v, place, len(qkv), queries, keys, dim, *kind(norm))


def weights(norm: HeadNorm | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.queries, norm.keys)


def kind(norm: HeadNorm | None) -> tuple[float, bool]:
    return (0.0, False) if norm is None else (norm.eps, norm.unit)


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor, norm: HeadNorm | None,
    room: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    assert not room, NO_ROOM
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    (tokens, queries, dim), keys = dq.shape, dk.shape[1]
    dqkv = dq.new_empty(tokens, (queries + 2 * keys) * dim)
    weighs = norm is not None and (norm.queries.requires_grad or norm.keys.requires_grad)
    parts = torch.empty(2, -(-tokens // CHUNK), dim) if weighs else None
    call("rotary_backward", dq.dtype, dq, dk, dv, qkv, cos, sin, *weights(norm), dqkv, parts,
         tokens, queries, keys, dim, *kind(norm))  # fmt: skip
    if norm is None or parts is None:
        return dqkv, None, None
    return dqkv, *(part.to(dq.dtype) for part in parts.sum(1))


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, pieces: Pieces, scores: Scores, exact: bool = False
) -> Tensor:
    assert pieces.prompt.dtype == pieces.answer.dtype == torch.int32 and pieces.length.dtype == torch.int64
    out, (rows, heads, dim), shared = torch.empty_like(q), q.shape, keys.shape[1]
    call("decode_attention", q.dtype, q, keys, values, out, pieces.prompt, pieces.prompt_length, pieces.answer,
         pieces.length, None if scores.sinks is None else scores.sinks.float(), rows, shared, heads // shared, dim,
         scores.scaling, scores.softcap or 0.0, scores.window or 0)  # fmt: skip
    return out


def short_attention(q: Tensor, k: Tensor, v: Tensor, groups: PromptGroups, scale: float) -> Tensor:
    """``q [T, H, D], k, v [T, K, D] -> [T, H, D]``; zero for tokens of no sequence."""
    out = torch.empty_like(q)
    out[groups.end :] = 0
    call("short_attention", q.dtype, q, k, v, out, *groups.layout(q, k), scale)
    return out


def short_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, groups: PromptGroups, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for grad in (dq, dk, dv):
        grad[groups.end :] = 0
    call("short_attention_backward", q.dtype, q, k, v, dout, dq, dk, dv, *groups.layout(q, k), scale)
    return dq, dk, dv


def draw(logits: Tensor, draws: Draws, temperature: float) -> None:
    logits, (rows, vocab_size), greedy = logits.float().contiguous(), logits.shape, temperature == 0.0
    call("draw", logits.dtype, logits, draws.numbers, draws.tokens, draws.log_probs, draws.token, draws.drawn,
         draws.done, draws.limit, draws.stops, rows, vocab_size, draws.tokens.shape[1], len(draws.stops),
         1.0 if greedy else 1.0 / temperature, greedy)  # fmt: skip


def gather(
    logits: Tensor, tokens: Tensor, first: int, temperature: float, top: Tensor, total: Tensor, chosen: Tensor,
    weighted: Tensor | None, squared: Tensor | None, odd: bool = False,
) -> None:  # fmt: skip
    assert tokens.dtype == torch.int64
    call("gather", logits.dtype, logits, tokens, top, total, chosen, weighted, squared, *logits.shape, first,
         1.0 / temperature)  # fmt: skip


def gradient(
    logits: Tensor, tokens: Tensor, first: int, temperature: float, normaliser: Tensor, entropy: Tensor, outer: Tensor,
    slope: Tensor | None, softcap: float | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    assert tokens.dtype == torch.int64
    out = torch.empty(logits.shape, dtype=dtype)
    call("gradient", dtype, logits, tokens, normaliser, entropy, outer, slope, out, *logits.shape, first,
         1.0 / temperature, temperature / softcap if softcap else 0.0)  # fmt: skip
    return out
