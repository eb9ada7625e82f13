"""Queries, keys and values out of one projection: normed where a model does so, rotated, put where they are read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paddock.kernels.arguments import HeadNorm
from paddock.kernels.launch import early, filling, power_of_two

PAIRS = 1024  # pairs of numbers, each rotated by one angle, that one program has


@triton.jit
def halves(ROW, column, half, mask):
    first = tl.load(ROW + column, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(ROW + column + half, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def head_weights(WQ, WK, column, half, is_query, UNIT: tl.constexpr):
    """[heads, half] twice: the norm's weight, that of queries or that of keys."""
    q1, q2 = halves(WQ, column, half, column < half)
    k1, k2 = halves(WK, column, half, column < half)
    first, second = tl.where(is_query, q1[None, :], k1[None, :]), tl.where(is_query, q2[None, :], k2[None, :])
    if UNIT:
        first, second = first + 1.0, second + 1.0
    return first, second


@triton.jit
def rotate(
    QKV, COS, SIN, WQ, WK, Q, K, V, PLACE, stride, rows, queries, keys, dim, eps, PLACED: tl.constexpr,
    NORMED: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotates q and k heads by the angle of their token; k and v go to their place. A row is one head of one token."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    token, head = (row // (queries + 2 * keys)).to(tl.int64), row % (queries + 2 * keys)
    column, half = tl.arange(0, HALF), dim // 2
    is_query, turns = head < queries, head < queries + keys
    inside = (row < rows) & (column < half)[None, :]
    narrow = Q.dtype.element_ty
    x1, x2 = halves(QKV + token * stride + head * dim, column[None, :], half, inside)
    n1, n2 = x1, x2
    if NORMED:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / dim + eps)[:, None]
        w1, w2 = head_weights(WQ, WK, column, half, is_query, UNIT)
        n1, n2 = x1 * scale * w1, x2 * scale * w2
    cos1, cos2 = halves(COS + token * dim, column[None, :], half, inside)
    sin1, sin2 = halves(SIN + token * dim, column[None, :], half, inside)
    # a compiler may fuse the sum with either product; exact numerics need the same one in training and decode
    turned1, turned2 = tl.fma(n1, cos1, -(n2 * sin1)), tl.fma(n2, cos2, n1 * sin2)
    out1, out2 = tl.where(turns, turned1, x1).to(narrow), tl.where(turns, turned2, x2).to(narrow)
    place = tl.load(PLACE + token, mask=row < rows, other=0).to(tl.int64) if PLACED else token
    q = Q + (token * queries + head) * dim + column[None, :]
    k = K + (place * keys + head - queries) * dim + column[None, :]
    v = V + (place * keys + head - queries - keys) * dim + column[None, :]
    tl.store(q, out1, mask=inside & is_query)
    tl.store(q + half, out2, mask=inside & is_query)
    tl.store(k, out1, mask=inside & turns & (head >= queries))
    tl.store(k + half, out2, mask=inside & turns & (head >= queries))
    tl.store(v, out1, mask=inside & (head >= queries + keys))
    tl.store(v + half, out2, mask=inside & (head >= queries + keys))


@triton.jit
def rotate_backward(
    DQ, DK, DV, QKV, COS, SIN, WQ, WK, DQKV, DWQ, DWK, stride, dstride, rows, queries, keys, dim, eps,
    NORMED: tl.constexpr, UNIT: tl.constexpr, WEIGHS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates gradients back, through the norm, into that of one projection; those of the norm's weights in parts."""
    program = tl.program_id(0)
    column, half = tl.arange(0, HALF), dim // 2
    dq1, dq2 = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    dk1, dk2 = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    for turn in range(0, tl.cdiv(rows, tl.num_programs(0) * BLOCK)):
        row = (turn * tl.num_programs(0) + program) * BLOCK + tl.arange(0, BLOCK)[:, None]
        token, head = (row // (queries + 2 * keys)).to(tl.int64), row % (queries + 2 * keys)
        is_query, turns = head < queries, head < queries + keys
        inside = (row < rows) & (column < half)[None, :]
        q1, q2 = halves(DQ + (token * queries + head) * dim, column[None, :], half, inside & is_query)
        k = DK + (token * keys + head - queries) * dim
        k1, k2 = halves(k, column[None, :], half, inside & turns & (head >= queries))
        v = DV + (token * keys + head - queries - keys) * dim
        v1, v2 = halves(v, column[None, :], half, inside & (head >= queries + keys))
        y1, y2 = q1 + k1 + v1, q2 + k2 + v2
        cos1, cos2 = halves(COS + token * dim, column[None, :], half, inside)
        sin1, sin2 = halves(SIN + token * dim, column[None, :], half, inside)
        d1, d2 = y1 * cos1 + y2 * sin2, y2 * cos2 - y1 * sin1
        if NORMED:
            x1, x2 = halves(QKV + token * stride + head * dim, column[None, :], half, inside)
            scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / dim + eps)[:, None]
            x1, x2 = x1 * scale, x2 * scale
            if WEIGHS:
                dq1 += tl.sum(tl.where(is_query, d1 * x1, 0.0), 0)
                dq2 += tl.sum(tl.where(is_query, d2 * x2, 0.0), 0)
                dk1 += tl.sum(tl.where(turns & (head >= queries), d1 * x1, 0.0), 0)
                dk2 += tl.sum(tl.where(turns & (head >= queries), d2 * x2, 0.0), 0)
            w1, w2 = head_weights(WQ, WK, column, half, is_query, UNIT)
            d1, d2 = d1 * w1, d2 * w2
            mean = ((tl.sum(d1 * x1, 1) + tl.sum(d2 * x2, 1)) / dim)[:, None]
            d1, d2 = (d1 - x1 * mean) * scale, (d2 - x2 * mean) * scale
        target = DQKV + token * dstride + head * dim + column[None, :]
        tl.store(target, tl.where(turns, d1, y1).to(DQKV.dtype.element_ty), mask=inside)
        tl.store(target + half, tl.where(turns, d2, y2).to(DQKV.dtype.element_ty), mask=inside)
    if WEIGHS:
        part = program * dim + column
        tl.store(DWQ + part, dq1, mask=column < half)
        tl.store(DWQ + part + half, dq2, mask=column < half)
        tl.store(DWK + part, dk1, mask=column < half)
        tl.store(DWK + part + half, dk2, mask=column < half)


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, cos: Tensor, sin: Tensor, norm: HeadNorm | None,
    room: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of the projection, which a norm of heads must see again, and of that norm's two weights if trained.

    That of the projection has `room` more columns, which are left as they are.
    """
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    tokens, queries, dim = dq.shape
    keys = dk.shape[1]
    heads, half = queries + 2 * keys, power_of_two(dim // 2)
    dqkv, block = dq.new_empty(tokens, heads * dim + room), max(1, PAIRS // half)
    programs = triton.cdiv(tokens * heads, block)
    if norm is not None:
        programs = min(programs, filling(dq.device))
    weighs = norm is not None and (norm.queries.requires_grad or norm.keys.requires_grad)
    parts = dq.new_empty(2, programs if weighs else 1, dim, dtype=torch.float32)
    rotate_backward[(programs,)](
        dq, dk, dv, dq if qkv is None else qkv, cos, sin, cos if norm is None else norm.queries,
        cos if norm is None else norm.keys, dqkv, parts[0], parts[1],
        0 if qkv is None else qkv.stride(0), dqkv.stride(0), tokens * heads, queries, keys, dim,
        0.0 if norm is None else norm.eps, norm is not None, norm is not None and norm.unit, weighs, half, block,
        num_warps=4,
    )  # fmt: skip
    if norm is None or not weighs:
        return dqkv, None, None
    sums = parts.sum(1)
    return dqkv, sums[0].to(norm.queries.dtype), sums[1].to(norm.keys.dtype)


def rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm | None, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None
) -> None:
    """Fills ``q [T, H, D]``, ``k`` and ``v [rows, K, D]`` from ``qkv [T, (H + 2K) D]``, between whose rows there may be
    other numbers. Keys and values of token t go to row ``place[t]``, or to row t without `place`."""
    queries, dim = q.shape[1:]
    keys, soon, half = k.shape[1], early(qkv.device), power_of_two(dim // 2)
    rows, block = len(qkv) * (queries + 2 * keys), max(1, PAIRS // half)
    if rows:
        rotate[(triton.cdiv(rows, block),)](
            qkv, cos, sin, cos if norm is None else norm.queries, cos if norm is None else norm.keys, q, k, v,
            qkv if place is None else place, qkv.stride(0), rows, queries, keys, dim,
            0.0 if norm is None else norm.eps, place is not None, norm is not None, norm is not None and norm.unit,
            half, block, bool(soon), num_warps=4, **soon,
        )  # fmt: skip
