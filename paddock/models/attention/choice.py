"""The table of attention: which implementation serves which layer, on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from paddock.core.device import has_flash
from paddock.kernels import native
from paddock.kernels.arguments import VECTOR
from paddock.kernels.choice import kernels_for
from paddock.models.attention.interface import AttentionCall

MAX_FLASH_HEAD_DIM = 256
FLASH_HEAD_STEP = 8  # torch's kernel refuses other widths
MOST_KEYS = 512
"""Most keys (prompt tokens + own tokens) per sequence for which the kernel for short sequences is used."""

Layout = Literal["packed", "padded", "slots", "pool"]
Way = Literal["sinks", "flash", "short", "blocks", "products", "sdpa", "kernel"]


def has_sinks(call: AttentionCall) -> bool:
    return call.scores.sinks is not None


def is_bent(call: AttentionCall) -> bool:
    return call.scores.sinks is not None or call.scores.softcap is not None


def flash_can(call: AttentionCall) -> bool:
    dim = call.q.shape[-1]
    fits = dim == call.v.shape[-1] <= MAX_FLASH_HEAD_DIM and dim % FLASH_HEAD_STEP == 0
    return has_flash(call.q, call.scores.window) and fits and call.scores.softcap is None


def is_short(call: AttentionCall) -> bool:
    dim, scores = call.q.shape[-1], call.scores
    fits = call.most_keys <= MOST_KEYS and dim == call.v.shape[-1] and dim % VECTOR == 0 and len(call.q) > 0
    plain = scores.window is None and scores.softcap is None
    return plain and fits and native.can_run(call.q, call.k, call.v)


def always(call: AttentionCall) -> bool:
    return True


TABLE: dict[Layout, tuple[tuple[Way, Callable[[AttentionCall], bool]], ...]] = {
    "packed": (
        ("sinks", has_sinks),  # gpt-oss
        ("flash", flash_can),  # bf16 or fp16 on a GPU or NPU, heads of one width up to 256, a multiple of 8; no softcap
        ("short", is_short),  # a CPU with compiled kernels, at most 512 keys, no window, no softcap
        ("blocks", always),  # softcaps, wide heads, fp32 on a GPU, long sequences on a CPU
    ),
    "padded": (
        ("products", is_bent),  # gpt-oss, or Gemma 2, which caps its scores
        ("sdpa", always),  # torch's own
    ),
    "slots": (
        ("products", is_bent),
        ("sdpa", always),  # torch's own, over neighbouring slots of like length
    ),
    "pool": (("kernel", always),),  # one decode kernel per device; it knows windows, softcaps and sinks
}
"""The implementations of each layout, and when each serves a call: the first that does computes it."""


def choose(layout: Layout, call: AttentionCall) -> Way:
    """Returns the implementation that serves one layer's call."""
    return next(way for way, serves in TABLE[layout] if serves(call))


def cache_layout(weight: Tensor) -> Layout:
    """Returns the layout of a rollout's KV cache: "pool" if decode kernels exist for these weights, else "slots"."""
    return "pool" if kernels_for(weight) is not None else "slots"
