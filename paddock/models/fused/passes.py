"""What a layer does between its products, in few passes over memory each way: by kernels of the device at hand, or in
torch where there are none (a CPU without a compiler).

Both have the same arguments and results, and round where transformers rounds or less often; kernels round what they
store, and nothing before. Nothing here is seen by autograd: `layer.py` calls backward functions by name, and they
compute again what is cheaper than to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from paddock.kernels.arguments import HeadNorm
from paddock.kernels.choice import kernels_for
from paddock.kernels.launch import can_launch

aten = torch.ops.aten
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "silu": (silu, aten.silu_backward.grad_input),
    "gelu_pytorch_tanh": (
        partial(gelu, approximate="tanh"),
        partial(aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}
"""The value, and the gradient of (gradient of the value, x), written to `grad_input`."""


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, unit: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """``norm(x + branch) * weight`` in `dtype`, ``x + branch`` in the type of x, and 1 / rms of each row ``[T, D]``.

    `unit`: the weight is kept as its difference from 1, as in Gemma.
    """
    if kernels := norm_kernels(x, dtype, weight, branch):
        return kernels.add_norm(x, branch, weight, eps, unit, dtype)
    total = x if branch is None else x + branch
    wide = total.float()
    scale = torch.linalg.vector_norm(wide, dim=-1).square_().div_(x.shape[1]).add_(eps).rsqrt_()
    y = wide * scale[:, None] if wide is total else wide.mul_(scale[:, None])
    return y.mul_(weight.float() + int(unit)).to(dtype), total, scale


def add_norm_backward(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor, unit: bool, branch_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx = (w dy - x^ mean(w dy x^)) / rms + dsum, with x^ = x / rms; the same in the branch's type; sum of dy x^."""
    if kernels := norm_kernels(total, dy.dtype, weight, dy) if branch_dtype in (dy.dtype, total.dtype) else None:
        return kernels.add_norm_backward(dy, dsum, total, weight, scale, unit, branch_dtype)
    factor, by_row = weight.float() + int(unit), scale[:, None]
    x, dx = total * by_row if total.dtype == torch.float32 else total.float().mul_(by_row), dy.float()
    product = dx * x
    mean = (product @ factor).div_(total.shape[1])[:, None]
    dx = dx * factor if dx is dy else dx.mul_(factor)
    dx = dx.addcmul_(x, mean, value=-1).mul_(by_row).to(total.dtype)
    dx = dx if dsum is None else dx.add_(dsum)
    return dx, dx.to(branch_dtype), product.sum(0).to(weight.dtype) if weight.requires_grad else None


def norm_kernels(stream: Tensor, dtype: torch.dtype, weight: Tensor, other: Tensor | None) -> Any:
    """Returns the kernels of norms: a CPU's know one type, and beside it a stream in float32."""
    if can_launch(stream):
        return kernels_for(stream)
    known = dtype == weight.dtype and stream.dtype in (weight.dtype, torch.float32)
    return kernels_for(weight, other) if known else None


def gated(both: Tensor, activation: str) -> Tensor:
    """act(gate) * up of a gated MLP, from one projection of both: ``[T, 2 I] -> [T, I]``."""
    if kernels := kernels_for(both):
        return kernels.gated(both, activation)
    gate, up = both.chunk(2, 1)
    return ACTIVATIONS[activation][0](gate).mul_(up)


def gated_backward(dout: Tensor, both: Tensor, activation: str, room: int = 0) -> tuple[Tensor, Tensor]:
    """The gradient of `both`, and ``gated(both)``: the next gradient reads it, so it need not be kept until then.

    `room`: columns more in the gradient, which are left as they are.
    """
    if kernels := kernels_for(both, dout):
        return kernels.gated_backward(dout, both, activation, room)
    act, act_backward = ACTIVATIONS[activation]
    (gate, up), dboth = both.chunk(2, 1), both.new_empty(len(both), both.shape[1] + room)
    dgate, dup = dboth[:, : both.shape[1]].chunk(2, 1)
    value = act(gate)
    torch.mul(dout, value, out=dup)
    act_backward(dout * up, gate, grad_input=dgate)
    return dboth, value.mul_(up)


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm | None, keys: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``qkv [T, (H + 2K) D], cos, sin [T, D] -> q [T, H, D], k [T, K, D], v [T, K, D]``; none is a part of qkv."""
    if kernels := kernels_for(qkv, cos, *weights_of(norm)):
        counts = qkv.shape[1] // dim - 2 * keys, keys, keys
        q, k, v = (qkv.new_empty(len(qkv), count, dim) for count in counts)
        kernels.rotary(qkv, cos, sin, norm, q, k, v, None)
        return q, k, v
    heads = qkv.unflatten(1, (-1, dim))
    queries = heads.shape[1] - 2 * keys
    turning = heads[:, :-keys]
    if norm is not None:
        parts = (turning[:, :queries], norm.queries), (turning[:, queries:], norm.keys)
        turning = torch.cat([head_norm(part, weight, norm)[0] for part, weight in parts], 1)
    turned = torch.empty_like(turning, memory_format=torch.contiguous_format)
    turn(turning, cos[:, None], half_negative(sin), turned)
    return turned[:, :queries], turned[:, queries:], heads[:, -keys:].contiguous()


def rotary_into(
    qkv: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm | None, keys: Tensor, values: Tensor, place: Tensor
) -> Tensor:
    """The queries ``[T, H, D]``; keys and values of token t go to row ``place[t]`` of buffers ``[rows, K, D]``."""
    if kernels := kernels_for(qkv, cos, keys, *weights_of(norm)):
        count, dim = keys.shape[1:]
        q = qkv.new_empty(len(qkv), qkv.shape[1] // dim - 2 * count, dim)
        kernels.rotary(qkv, cos, sin, norm, q, keys, values, place)
        return q
    q, *stored = rotary(qkv, cos, sin, norm, *keys.shape[1:])
    for buffer, new in zip((keys, values), stored, strict=True):
        buffer.index_copy_(0, place, new.to(buffer.dtype))
    return q


def rotary_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: HeadNorm | None,
    room: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the projection, which a norm of heads must see again, and of that norm's two weights if trained.

    `room`: columns more in the projection's, which are left as they are.
    """
    if kernels := kernels_for(dq, dk, dv, cos, *weights_of(norm)):
        return kernels.rotary_backward(dq, dk, dv, qkv, cos, sin, norm, room)
    (tokens, queries, dim), keys = dq.shape, dk.shape[1]
    width = (queries + 2 * keys) * dim
    dqkv = dq.new_empty(tokens, width + room)
    parts = dqkv[:, :width].unflatten(1, (-1, dim)).split([queries, keys, keys], 1)
    back = half_negative(sin).roll(dim // 2, -1)  # of x c + swap(x) s: dy c + swap(dy s) = dy c + swap(dy) swap(s)
    for grad, part in zip((dq, dk), parts, strict=False):
        turn(grad, cos[:, None], back, part)
    parts[2].copy_(dv)
    by_weight: list[Tensor | None] = [None, None]
    if norm is not None and qkv is not None:
        read = qkv.unflatten(1, (-1, dim)).split([queries, keys, keys], 1)
        for place, weight in enumerate((norm.queries, norm.keys)):
            _, total, scale = head_norm(read[place], weight, norm)
            dy = parts[place].reshape(-1, dim)
            dx, _, by_weight[place] = add_norm_backward(dy, None, total, weight, scale, norm.unit, dy.dtype)
            parts[place].copy_(dx.view_as(parts[place]))
    return dqkv, by_weight[0], by_weight[1]


def head_norm(heads: Tensor, weight: Tensor, norm: HeadNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises each head ``[T, heads, D]``; also returns what the backward reads."""
    y, total, scale = add_norm(heads.reshape(-1, heads.shape[2]), None, weight, norm.eps, norm.unit, heads.dtype)
    return y.view(heads.shape), total, scale


def weights_of(norm: HeadNorm | None) -> tuple[Tensor, ...]:
    return () if norm is None else (norm.queries, norm.keys)


def half_negative(sin: Tensor) -> Tensor:
    """``[T, D] -> [T, 1, D]``: the second half of a head comes to the first with a minus."""
    half = sin.shape[1] // 2
    return torch.cat([sin[:, :half].neg(), sin[:, half:]], 1)[:, None]


def turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """x cos + swap(x) sin, where swap exchanges the halves of each head."""
    first, second = x.chunk(2, -1)
    for part, half, other in zip(out.chunk(2, -1), sin.chunk(2, -1), (second, first), strict=True):
        torch.mul(other, half, out=part)
    out.addcmul_(x, cos)
