"""One decoder layer, forward and backward, as a handful of launches: autograd sees it as one step.

Half the time of a small model's update went into autograd's own work between kernels. What a backward needs is kept on
a `Tape`; attention alone has a graph of its own, whatever way it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paddock.kernels.arguments import HeadNorm
from paddock.kernels.launch import has_triton
from paddock.models.attention import Scores
from paddock.models.fused.joined import Joined, Unfit
from paddock.models.fused.passes import (
    ACTIVATIONS,
    add_norm,
    add_norm_backward,
    gated,
    gated_backward,
    rotary,
    rotary_backward,
    rotary_into,
)

if has_triton():
    from paddock.kernels.packed import packed_attention

PLAIN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SANDWICH = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm, of one of the two kinds."""

    weight: nn.Parameter
    eps: float
    unit: bool

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module) -> Norm:
        """Finds out which kind a module is, by its output for some numbers."""
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(weight, nn.Parameter) and eps is not None:
            x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
            wanted = module(x).float()
            for unit in (False, True):
                norm = cls(weight, float(eps), unit)
                if torch.allclose(norm(x, None, x.dtype)[0].float(), wanted, rtol=2e-2, atol=1e-3):
                    return norm
        raise Unfit(f"a norm is a {type(module).__name__}")

    def __call__(self, x: Tensor, branch: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return add_norm(x, branch, self.weight, self.eps, self.unit, dtype)

    def backward(
        self, dy: Tensor, dsum: Tensor | None, kept: tuple[Tensor, ...], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`kept`: what the norm read, and 1 / rms; gradients of x, of the branch and of the weight if it is trained."""
        total, scale = kept
        return add_norm_backward(dy, dsum, total, self.weight, scale, self.unit, dtype)

    def last(self, residual: Tensor, branch: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalises the output of the last layer."""
        return LastNorm.apply(self, residual, branch, dtype, self.weight)


class LastNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: Norm, residual: Tensor, branch: Tensor, dtype: torch.dtype, weight: Tensor) -> Tensor:
        y, total, scale = norm(residual, branch, dtype)
        ctx.norm, ctx.dtype = norm, branch.dtype
        ctx.save_for_backward(total, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx, dbranch, dweight = ctx.norm.backward(grads[0].contiguous(), None, ctx.saved_tensors, ctx.dtype)
        return None, dx, dbranch, None, dweight


@dataclass(frozen=True, eq=False)
class SharedInput:
    """What the layers of one forward have in common."""

    cos: Tensor
    sin: Tensor
    how: Any
    """An `Attention`, in decode a `PoolDecode`."""
    shape: tuple[int, int]
    """Shape of the tokens: a packed row, or rows of one token in a decode."""
    adapted: bool
    """Adapters are on, if the model has any."""


@dataclass(eq=False)
class Tape:
    """What a layer's backward reads of its forward."""

    branch_dtype: torch.dtype | None = None
    first: tuple[Tensor, ...] = ()
    """Input and 1 / rms of the norm before attention. Its output is computed again in backward."""
    qkv: Tensor | None = None
    attention: tuple[Tensor, ...] = ()
    """The output, with a graph, and its q, k, v."""
    after_attention: tuple[Tensor, ...] = ()
    second: tuple[Tensor, ...] = ()
    both: Tensor | None = None
    after_mlp: tuple[Tensor, ...] = ()
    low: tuple[Tensor | None, ...] = (None,) * 4
    """A x of each product with adapters, in the order of `Layer.joined`."""


class Layer:
    """Attention and gated MLP, each behind a norm, in some families with norms behind them as well."""

    def __init__(self, layer: Any, scores: Scores, exact: bool, keep_apart: bool = False):
        self.exact, self.scores = exact, scores
        names = {name for name, _ in layer.named_children()}
        if names not in (PLAIN, PLAIN | SANDWICH):
            raise Unfit(f"a layer has {', '.join(sorted(names ^ PLAIN))}")
        self.module, mlp = layer.self_attn, layer.mlp
        children = {name for name, _ in self.module.named_children()}
        if children - PROJECTIONS not in (set(), {"q_norm", "k_norm"}) or not children >= PROJECTIONS:
            raise Unfit(f"its attention has {', '.join(sorted(children ^ PROJECTIONS))}")
        if {name for name, _ in mlp.named_children()} | {"act_fn"} != GATED:
            raise Unfit("its MLP is not a gated one")
        self.index, self.dim = int(self.module.layer_idx), int(self.module.head_dim)
        groups = (
            [self.module.q_proj, self.module.k_proj, self.module.v_proj],
            [self.module.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        )
        self.joined = [Joined(modules, exact, keep_apart) for modules in groups]
        self.qkv, self.out, self.both, self.down = self.joined
        self.keys = self.qkv.sizes[1] // self.dim
        self.head_norm: HeadNorm | None = None
        if "q_norm" in children:
            queries, keys = Norm.of(self.module.q_norm), Norm.of(self.module.k_norm)
            self.head_norm = HeadNorm(queries.weight, keys.weight, queries.eps, queries.unit)
        self.activation = activation_of(mlp.act_fn, self.down.weight.device)
        self.first, after = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        sandwich = names > PLAIN
        self.after_attention = after if sandwich else None
        self.second = Norm.of(layer.pre_feedforward_layernorm) if sandwich else after
        self.after_mlp = Norm.of(layer.post_feedforward_layernorm) if sandwich else None

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters in the order in which `backward` returns their gradients."""
        heads = [] if self.head_norm is None else [self.head_norm.queries, self.head_norm.keys]
        norms = [norm.weight for norm in (self.first, self.after_attention, self.second, self.after_mlp) if norm]
        joined = [p for group in self.joined for p in group.parameters]
        return [*norms, *heads, *joined]

    def __call__(
        self, residual: Tensor, branch: Tensor | None, shared: SharedInput, recompute: bool
    ) -> tuple[Tensor, Tensor]:
        """The stream ``[T, hidden]`` and what is yet to be added to it: the next norm adds it on the way."""
        if hasattr(shared.how, "attend_stored"):
            return self.decode(residual, branch, shared)
        if not torch.is_grad_enabled():
            return self.forward(residual, branch, shared, None)
        return LayerPass.apply(self, shared, recompute, residual, branch, *self.parameters)

    def forward(
        self, residual: Tensor, branch: Tensor | None, shared: SharedInput, tape: Tape | None
    ) -> tuple[Tensor, Tensor]:
        dtype, turn, adapted = self.qkv.weight.dtype, (shared.cos, shared.sin), shared.adapted
        keeps = tape is not None
        first = self.first(residual, branch, dtype)
        qkv, low_qkv = self.qkv.forward(first[0], adapted, keeps)
        attention = self.attend(rotary(qkv, *turn, self.head_norm, self.keys, self.dim), shared, keeps)
        out, low_out = self.out.forward(attention[0].detach(), adapted, keeps)
        after = self.after_attention(out, None, dtype) if self.after_attention else (out,)
        second = self.second(first[1], after[0], dtype)
        both, low_both = self.both.forward(second[0], adapted, keeps)
        down, low_down = self.down.forward(gated(both, self.activation), adapted, keeps)
        end = self.after_mlp(down, None, dtype) if self.after_mlp else (down,)
        if tape is not None:
            tape.branch_dtype = None if branch is None else branch.dtype
            tape.first, tape.attention, tape.second, tape.both = first[1:], attention, second[1:], both
            tape.qkv = None if self.head_norm is None else qkv
            tape.after_attention, tape.after_mlp = after[1:], end[1:]
            tape.low = low_qkv, low_out, low_both, low_down
        return second[1], end[0]

    def decode(self, residual: Tensor, branch: Tensor | None, shared: SharedInput) -> tuple[Tensor, Tensor]:
        """Runs the layer for one token per sequence, and stores its key and value on the way: with so few rows the
        number of kernel launches counts."""
        dtype, adapted = self.qkv.weight.dtype, shared.adapted
        x, residual, _ = self.first(residual, branch, dtype)
        qkv, how, scores = self.qkv(x, adapted), shared.how, self.scores
        buffers = how.buffers(self.index, self.keys, self.dim, qkv)
        q = rotary_into(qkv, shared.cos, shared.sin, self.head_norm, *buffers)
        attended = how.attend_stored(self.index, q, scores, self.exact)
        attended = attended.flatten(1)
        if self.after_attention:
            out = self.after_attention(self.out(attended, adapted), None, dtype)[0]
        else:
            out = self.out.in_parts(attended, adapted)
        x, residual, _ = self.second(residual, out, dtype)
        inner = self.both.gated(x, self.activation, adapted)
        if self.after_mlp:
            return residual, self.after_mlp(self.down(inner, adapted), None, dtype)[0]
        return residual, self.down.in_parts(inner, adapted)

    def attend(self, qkv: tuple[Tensor, ...], shared: SharedInput, track: bool) -> tuple[Tensor, ...]:
        """The output ``[T, heads x dim]``, with a graph of its own if its backward will be asked for, and q, k, v."""
        how, scores = shared.how, self.scores
        with torch.set_grad_enabled(track):
            q, k, v = (x.requires_grad_(track) for x in qkv)
            rows = (x.unflatten(0, shared.shape).transpose(1, 2) for x in (q, k, v))
            out = how.attend(self.module, *rows, scores)
            out = out.flatten(0, 1).flatten(1)
        if not self.exact:
            return out, q, k, v
        value = packed_attention(q.detach(), k.detach(), v.detach(), how.tiles, scores).flatten(1)
        with torch.set_grad_enabled(track):  # the value of one way, the gradient of the other
            return value + (out - out.detach()) if track else value, q, k, v

    def backward(
        self, tape: Tape, shared: SharedInput, dresidual: Tensor, dbranch: Tensor
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        """Gradients of the stream, of the branch and of the parameters."""
        norms: list[Tensor | None] = []
        dtype, adapted = dbranch.dtype, shared.adapted
        low_qkv, low_out, low_both, low_down = tape.low
        if self.after_mlp:
            _, dbranch, grad = self.after_mlp.backward(dbranch, None, tape.after_mlp, dtype)
            norms.append(grad)
        assert tape.both is not None
        down = self.down.backward(dbranch, adapted)
        dboth, gate = gated_backward(down.dx, tape.both, self.activation, self.both.room(adapted))
        by_down = down.gradients(gate, low_down)
        both = self.both.backward(dboth, adapted)
        x = self.again(self.second, tape.second, dtype, self.both.reads_input(adapted))
        by_both = both.gradients(x, low_both)
        dresidual, dout, grad = self.second.backward(both.dx, dresidual, tape.second, dtype)
        norms.append(grad)
        if self.after_attention:
            _, dout, grad = self.after_attention.backward(dout, None, tape.after_attention, dtype)
            norms.append(grad)
        attended, *heads = tape.attention
        out = self.out.backward(dout, adapted)
        by_out = out.gradients(attended.detach(), low_out)
        dq, dk, dv = torch.autograd.grad(attended, heads, out.dx)
        dqkv, *by_heads = rotary_backward(
            dq, dk, dv, tape.qkv, shared.cos, shared.sin, self.head_norm, self.qkv.room(adapted)
        )
        qkv = self.qkv.backward(dqkv, adapted)
        x = self.again(self.first, tape.first, dtype, self.qkv.reads_input(adapted))
        by_qkv = qkv.gradients(x, low_qkv)
        dresidual, dbefore, grad = self.first.backward(
            qkv.dx, dresidual, tape.first, tape.branch_dtype or tape.first[0].dtype
        )
        norms.append(grad)
        grads = [*reversed(norms), *(by_heads if self.head_norm else []), *by_qkv, *by_out, *by_both, *by_down]
        return dresidual, None if tape.branch_dtype is None else dbefore, grads

    def again(self, norm: Norm, kept: tuple[Tensor, ...], dtype: torch.dtype, wanted: bool) -> Tensor | None:
        """Computes a projection's input again, if its gradients need it."""
        return norm(kept[0], None, dtype)[0] if wanted else None


class LayerPass(torch.autograd.Function):
    """``(layer, shared, recompute, residual, branch, *parameters) -> (residual, branch)``."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        shared: SharedInput,
        recompute: bool,
        residual: Tensor,
        branch: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.shared, ctx.tape = layer, shared, None
        if recompute:  # keeps the sum, which is all that it reads
            ctx.branch_dtype = None if branch is None else branch.dtype
            residual, branch = residual if branch is None else residual + branch, None
            ctx.save_for_backward(residual)
        else:
            ctx.tape = Tape()
        return layer.forward(residual, branch, shared, ctx.tape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tape = ctx.tape
        if tape is None:
            tape = Tape()
            ctx.layer.forward(*ctx.saved_tensors, None, ctx.shared, tape)
            tape.branch_dtype = ctx.branch_dtype
        ctx.tape = None  # memory goes as backward comes down
        dresidual, dbranch = (grad.contiguous() for grad in grads)
        dresidual, before, by_parameters = ctx.layer.backward(tape, ctx.shared, dresidual, dbranch)
        return None, None, None, dresidual, before, *by_parameters


def activation_of(function: Any, device: torch.device) -> str:
    x = torch.linspace(-3, 3, 64, device=device)[None]
    for name in ACTIVATIONS:
        if torch.allclose(gated(torch.cat([x, torch.ones_like(x)], 1), name), function(x), atol=1e-4):
            return name
    raise Unfit(f"its activation is {function}")
