"""Log-probs of several tokens at each position: of a teacher's likeliest ones, by the teacher and by the student.

The vocabulary is met in chunks, as in token_stats.py: the logits of a whole batch are never held.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from paddock.models.token_stats import Head, HeadGradients, find, logits_at


class Likeliest(NamedTuple):
    """The likeliest tokens met so far, ``[N, k]`` each, the likeliest first."""

    logits: Tensor
    tokens: Tensor

    def of_both(self, other: Likeliest, k: int) -> Likeliest:
        return Likeliest(*(torch.cat(both, -1) for both in zip(self, other, strict=True))).largest(k)

    def largest(self, k: int) -> Likeliest:
        best = self.logits.topk(min(k, self.logits.shape[-1]))
        return Likeliest(best.values, self.tokens.gather(-1, best.indices))


@torch.no_grad()
def likeliest_tokens(hidden: Tensor, head: Head, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the k likeliest tokens ``[N, k]`` of softmax(z / temperature) at each row of ``hidden [N, D]``, and
    their log-probs."""
    normaliser, _, best = vocabulary_pass(hidden, head, torch.zeros(len(hidden), 0, dtype=torch.long), k, temperature)
    return best.tokens, best.logits - normaliser.unsqueeze(-1)


def log_probs_of(hidden: Tensor, head: Head, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns log softmax(z / temperature) of ``tokens [N, k]``, with gradients to hidden states and head; and the
    log-prob ``[N]`` of the k-th likeliest token, without."""
    return Choices.apply(hidden, head.weight, head.bias, tokens, head, temperature)


def vocabulary_pass(
    hidden: Tensor, head: Head, tokens: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor, Likeliest]:
    """Returns log sum exp z ``[N]``, the logits of `tokens`, and the k likeliest tokens with theirs."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = len(hidden)
    tokens = (tokens - head.first).to(hidden.device)
    total, chosen = hidden.new_zeros(rows, dtype=wide), hidden.new_zeros(tokens.shape, dtype=wide)
    top = torch.full_like(total, torch.finfo(wide).min)
    best = Likeliest(hidden.new_zeros(rows, 0, dtype=wide), tokens.new_zeros(rows, 0))
    for part, piece in head.chunks():
        z = logits_at(piece, hidden, temperature)
        risen = torch.maximum(top, z.amax(-1))
        total = torch.exp(top - risen) * total + torch.exp(z - risen.unsqueeze(-1)).sum(-1)
        top = risen
        place, inside = find(tokens, part)
        chosen = torch.where(inside, z.gather(-1, place), chosen)
        here = z.topk(min(k, z.shape[-1]))
        best = best.of_both(Likeliest(here.values, here.indices + part.start + head.first), k)
    if head.ranks is not None:
        top, total, chosen, best = of_all_parts(head.ranks, top, total, chosen, best, k)
    return top + total.log(), chosen, best


def of_all_parts(
    ranks: ProcessGroup, top: Tensor, total: Tensor, chosen: Tensor, best: Likeliest, k: int
) -> tuple[Tensor, Tensor, Tensor, Likeliest]:
    """Joins what each rank found in its part of the vocabulary."""
    risen = top.clone()
    dist.all_reduce(risen, dist.ReduceOp.MAX, group=ranks)
    total = torch.exp(top - risen) * total
    for mine in (total, chosen):
        dist.all_reduce(mine, group=ranks)
    missing = (0, k - best.logits.shape[-1])  # a part may have fewer tokens
    logits = pad(best.logits, missing, value=torch.finfo(top.dtype).min)
    joined = Likeliest(from_all(logits, ranks), from_all(pad(best.tokens, missing), ranks)).largest(k)
    return risen, total, chosen, joined


def from_all(column: Tensor, ranks: ProcessGroup) -> Tensor:
    """Returns the columns ``[N, k]`` of all ranks, side by side."""
    parts = [torch.empty_like(column) for _ in range(ranks.size())]
    dist.all_gather(parts, column.contiguous(), group=ranks)
    return torch.cat(parts, -1)


class Choices(torch.autograd.Function):
    """``(hidden, weight, bias, tokens, head, temperature) -> (log_probs [N, k], log-prob [N] of the k-th token)``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        normaliser, chosen, best = vocabulary_pass(hidden, head, tokens, tokens.shape[-1], temperature)
        ctx.save_for_backward(hidden, weight, bias, tokens, normaliser)
        ctx.options = head.without_weights(), temperature
        kth = best.logits[:, -1] - normaliser
        ctx.mark_non_differentiable(kth)
        return chosen - normaliser.unsqueeze(-1), kth

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With g_j the gradient of log pi(t_j):  dz_v = sum_j g_j ([v = t_j] - pi_v)."""
        hidden, weight, bias, tokens, normaliser = ctx.saved_tensors
        head, temperature = replace(ctx.options[0], weight=weight, bias=bias), ctx.options[1]
        by_choice = grads[0] * (head.scale / temperature)
        by_all = by_choice.sum(-1, keepdim=True)
        tokens = tokens - head.first
        found = HeadGradients.empty(hidden, weight, bias, normaliser.dtype, ctx.needs_input_grad[1])
        for part, piece in head.chunks():
            z = logits_at(piece, hidden, temperature)
            bend = None if head.softcap is None else 1 - (z * (temperature / head.softcap)).square_()
            dz = z.sub_(normaliser.unsqueeze(-1)).exp_().mul_(-by_all)
            place, inside = find(tokens, part)
            dz.scatter_add_(1, place, by_choice * inside)
            found.add_logits(part, piece, dz if bend is None else dz.mul_(bend))
        return *found.tensors(), None, None, None
