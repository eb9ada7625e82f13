"""What the trainer asks of a vocabulary's distribution, without ever holding the logits of a whole batch.

The vocabulary is met in chunks of fixed size: forward keeps running sums, backward forms each chunk's logits again, and
between the two only hidden states and three numbers a token are kept. A row's numbers do not depend on the other rows.
Products run in the type of the weights, softmax and sums in float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import linear
from transformers import PreTrainedModel

from paddock.core.device import has_wide_products
from paddock.kernels.arguments import is_odd
from paddock.kernels.choice import kernels_for
from paddock.kernels.launch import has_triton
from paddock.models.fused import fused
from paddock.models.vision import vision_tokens

if has_triton():
    from paddock.kernels.matmul import exact_linear
    from paddock.kernels.statistics import normalise

CHUNK = {"cpu": 1024}
"""Tokens of the vocabulary at a time."""
DEVICE_CHUNK = 8192
NEVER = -1e9


@dataclass(frozen=True, eq=False)
class Head:
    """From hidden states to logits: ``z = c tanh(s (h W' + b) / c)``, with scale s and cap c if the model has them."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    exact: bool = False
    """A row's logits do not depend on the other rows, bit by bit (see models/fused)."""
    never: tuple[int, ...] = ()
    """Tokens that have probability 0: see `vision_tokens`."""
    first: int = 0
    """Token of the first row of the weight; other ranks have the rows before and after."""
    product: Callable[[Tensor], Tensor] | None = None
    """h W' + b another way: the layer's own forward, where it was exchanged for a while (see prepacked.py)."""
    ranks: ProcessGroup | None = None
    """Ranks that share the vocabulary. Each gets the gradient of hidden states that comes from its own part."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        layer, config = model.get_output_embeddings(), model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        decoder = fused(model)
        return cls(
            layer.weight,
            layer.bias,
            float(scale),
            getattr(config, "final_logit_softcapping", None),
            exact=decoder is not None and decoder.exact,
            never=vision_tokens(model.config),
            product=vars(layer).get("forward"),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """``[N, D] -> [N, V]`` in float32 or better."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.exact:
            z = exact_linear(hidden, self.weight, self.bias, wide)
        elif has_wide_products(hidden) and hidden.dtype != wide:
            z = torch.mm(hidden, self.weight.t(), out_dtype=wide)
            z = z if self.bias is None else z.add_(self.bias)
        else:
            z = (self.product(hidden) if self.product else linear(hidden, self.weight, self.bias)).to(wide)
        if self.scale != 1:
            z = z * self.scale
        return forbid(z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap), self.never)

    def without_weights(self) -> Head:
        """Returns what a backward keeps of the head beside the tensors that autograd saves."""
        return replace(self, weight=self.weight.new_empty(0), bias=None)

    def chunks(self) -> Iterator[tuple[slice, Head]]:
        """Parts of the vocabulary, each with a head of its own."""
        size = CHUNK.get(self.weight.device.type, DEVICE_CHUNK)
        for start in range(0, len(self.weight), size):
            part = slice(start, min(start + size, len(self.weight)))
            bias = None if self.bias is None else self.bias[part]
            never = tuple(token - start for token in self.never if start <= token < part.stop)
            yield part, replace(self, weight=self.weight[part], bias=bias, never=never, product=None)


def forbid(logits: Tensor, never: tuple[int, ...]) -> Tensor:
    """Gives these tokens probability 0, in place. A finite logit: 0 x infinity would spread."""
    for token in never:
        logits[:, token] = NEVER
    return logits


@dataclass(frozen=True, eq=False)
class TokenStats:
    log_probs: Tensor
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None


def token_stats(
    hidden: Tensor,
    head: Head,
    tokens: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> TokenStats:
    """Statistics of pi = softmax(z / temperature) at each row of ``hidden [N, D]``: log pi(token), its entropy, and sum
    pi^2.

    log-probs and entropy carry gradients to hidden states and head; sum pi^2 does not.
    """
    tokens = tokens - head.first if head.first else tokens
    how = head, temperature, entropy, sum_pi_squared
    log_probs, h, squares = Statistics.apply(hidden, head.weight, head.bias, tokens, *how)
    return TokenStats(log_probs, h if entropy else None, squares if sum_pi_squared else None)


class Statistics(torch.autograd.Function):
    """``(hidden, weight, bias, tokens, head, temperature, ...) -> (log_probs, entropy, sum_pi_squared)``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        head: Head,
        temperature: float,
        want_entropy: bool,
        want_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With e = exp(z - m), m = max z, S = sum e:  log pi = z - m - log S,  H = log S - sum(e (z - m)) / S.

        When a chunk raises m by d, what was summed before shrinks by exp(-d).
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total, chosen, weighted, squared = hidden.new_zeros(4, len(hidden), dtype=wide)
        top = torch.full_like(total, torch.finfo(wide).min)
        kernels = kernels_for(weight) if wide == torch.float32 else None
        for part, piece in head.chunks():
            if kernels:
                kernels.gather(piece.logits(hidden), tokens, part.start, temperature, top, total, chosen,
                               weighted if want_entropy else None, squared if want_squares else None,
                               is_odd(len(weight)))  # fmt: skip
                continue
            z = logits_at(piece, hidden, temperature)
            risen = torch.maximum(top, z.amax(-1))
            shrink = torch.exp(top - risen)
            place, inside = find(tokens, part)
            chosen = torch.where(inside, z.gather(-1, place.unsqueeze(-1)).squeeze(-1), chosen)
            z.sub_(risen.unsqueeze(-1))
            e = z.exp() if want_entropy else z.exp_()
            if want_entropy:
                weighted = shrink * (weighted + total * (top - risen)) + torch.linalg.vecdot(e, z)
            if want_squares:
                squared = shrink.square() * squared + torch.linalg.vecdot(e, e)
            total = shrink * total + e.sum(-1)
            top = risen
        if head.ranks is not None:
            top, total, chosen, weighted, squared = of_all_parts(head.ranks, top, total, chosen, weighted, squared)
        normaliser = normalise(top, total) if head.exact else top + total.log()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, bias, tokens, normaliser, entropy)
        ctx.options = head.without_weights(), temperature
        ctx.set_materialize_grads(False)
        squares = squared / total.square()
        ctx.mark_non_differentiable(squares)
        return chosen - normaliser, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log pi(y) / dz_v = [v = y] - pi_v,  dH / dz_v = -pi_v (log pi_v + H)."""
        hidden, weight, bias, tokens, normaliser, entropy = ctx.saved_tensors
        (head, temperature), (by_log_prob, by_entropy, _) = ctx.options, grads
        inner = head.scale / temperature
        outer = torch.zeros_like(normaliser) if by_log_prob is None else by_log_prob * inner
        slope = None if by_entropy is None else (by_entropy * inner).unsqueeze(-1)
        found = HeadGradients.empty(hidden, weight, bias, normaliser.dtype, ctx.needs_input_grad[1])
        kernels = kernels_for(weight) if normaliser.dtype == torch.float32 and bias is None else None
        for part, piece in replace(head, weight=weight, bias=bias).chunks():
            if kernels:
                by_slope = None if by_entropy is None else by_entropy * inner
                narrow = kernels.gradient(piece.logits(hidden), tokens, part.start, temperature, normaliser, entropy,
                                          outer, by_slope, head.softcap, weight.dtype)  # fmt: skip
                found.add(part, piece, narrow)
                continue
            z = logits_at(piece, hidden, temperature)
            bend = None if head.softcap is None else 1 - (z * (temperature / head.softcap)).square_()
            z.sub_(normaliser.unsqueeze(-1))  # log pi
            if slope is None:
                dz = z.exp_().mul_(-outer.unsqueeze(-1))
            else:
                base = outer.unsqueeze(-1) + slope * entropy.unsqueeze(-1)
                dz = z.exp().neg_().mul_(z.mul_(slope).add_(base))
            place, inside = find(tokens, part)
            dz.scatter_add_(1, place.unsqueeze(-1), (outer * inside).unsqueeze(-1))
            found.add_logits(part, piece, dz if bend is None else dz.mul_(bend))
        return *found.tensors(), *([None] * 5)


@dataclass(eq=False)
class HeadGradients:
    """Adds up the gradients of hidden states and head over the chunks of the vocabulary."""

    hidden: Tensor
    d_hidden: Tensor
    d_weight: Tensor | None
    d_bias: Tensor | None

    @classmethod
    def empty(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype, trained: bool
    ) -> HeadGradients:
        """`wide` is the type of sums; a head that is not `trained` gets no gradient."""
        d_weight = torch.empty_like(weight) if trained else None
        d_bias = None if bias is None else torch.empty_like(bias)
        return cls(hidden, torch.zeros_like(hidden, dtype=wide), d_weight, d_bias)

    def add_logits(self, part: slice, head: Head, dz: Tensor) -> None:
        """Adds a chunk by the gradient of its logits, of the products of head and hidden states."""
        if self.d_bias is not None:
            self.d_bias[part] = dz.sum(0)
        self.add(part, head, dz.to(head.weight.dtype))

    def add(self, part: slice, head: Head, narrow: Tensor) -> None:
        """Adds a chunk by that gradient in the type of the weights; a bias gets none."""
        self.d_hidden += narrow @ head.weight
        if self.d_weight is not None:
            torch.mm(narrow.t(), self.hidden, out=self.d_weight[part])

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.d_hidden.to(self.hidden.dtype), self.d_weight, self.d_bias


def of_all_parts(
    ranks: ProcessGroup, top: Tensor, total: Tensor, chosen: Tensor, weighted: Tensor, squared: Tensor
) -> tuple[Tensor, ...]:
    """The running sums over the whole vocabulary, of those that each rank has over its part.

    As when a chunk raises the maximum: what was summed under a lower one shrinks.
    """
    risen = top.clone()
    dist.all_reduce(risen, dist.ReduceOp.MAX, group=ranks)
    shrink = torch.exp(top - risen)
    weighted = shrink * (weighted + torch.where(total > 0, total * (top - risen), 0))
    sums = torch.stack([shrink * total, chosen, weighted, shrink.square() * squared])
    dist.all_reduce(sums, group=ranks)
    return risen, *sums.unbind()


def logits_at(head: Head, hidden: Tensor, temperature: float) -> Tensor:
    z = head.logits(hidden)
    return z if temperature == 1 else z.div_(temperature)


def find(tokens: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Returns the indices of the tokens in a part of the vocabulary, and True for those that are in it."""
    inside = (tokens >= part.start) & (tokens < part.stop)
    return (tokens - part.start).clamp(0, part.stop - part.start - 1), inside
