"""Linear layers that read the same input as one product, with the adapters beside them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from paddock.kernels.launch import can_launch, has_triton
from paddock.models.adapters import SUM, AdapterPair, merged_weight
from paddock.models.fused.passes import gated

if has_triton():
    from paddock.kernels.lora import narrow, widen
    from paddock.kernels.matmul import exact_linear
    from paddock.kernels.thin import MOST_GATED_ROWS, is_thin, thin_gated, thin_parts

ALIGNED = 16  # rows behind the weights: a GPU reads rows of their product fast where each begins at such a multiple


class Unfit(Exception):
    """The model does something that the fused forward does not; the text says what."""


class Joined:
    """Linear layers that read the same input. Their parameters are parts of one tensor, so one product serves all.

    On a GPU the A of their adapters are further rows of it, ``[W; A]``: one product computes y and A x, and one the
    gradient of x. With `keep_apart` they are not: offloaded weights that are frozen are sent to the host once, unless
    trained ones share their memory. Nor are they on a CPU, whose kernels read rows of y without gaps, nor where layers
    hold W + s B A (`Adapters.hold_merged`): then y is one product with that, and A x is computed in backward.

    No gradient is computed for what is frozen.
    """

    def __init__(self, modules: Sequence[nn.Module], exact: bool, keep_apart: bool = False):
        self.exact = exact
        self.layers, pairs = zip(*(apart(module) for module in modules), strict=True)
        self.sizes = [layer.out_features for layer in self.layers]
        self.biased = any(layer.bias is not None for layer in self.layers)
        if self.biased and not all(layer.bias is not None for layer in self.layers):
            raise Unfit("some projections have a bias and others have none")
        self.rows = sum(self.sizes)
        self.weight = side_by_side(self.weights)
        self.bias = side_by_side(self.biases) if self.biased else None
        self.adapters = Beside(pairs, self.sizes, exact) if any(pairs) else None
        self.merged = self.join_merged(modules)
        """Every W + s B A, as `weight` is every W."""
        self.whole: Tensor | None = None
        """``[W; A]``, and zeros up to an aligned number of rows."""
        self.whole_bias: Tensor | None = None
        if self.adapters and self.merged is None and not keep_apart and can_launch(self.weight):
            self.stack(self.adapters)
        self.ordered: Callable[[Tensor], Tensor] | None = None
        """The product, for a while, with weights in the order of a CPU; see prepacked.py."""

    @torch.no_grad()
    def join_merged(self, modules: Sequence[nn.Module]) -> Tensor | None:
        """Moves the merged weights of these layers, if they hold them, into one tensor; they become views of it. A
        layer without an adapter has its weight there once more."""
        held = [merged_weight(module) for module in modules]
        if all(one is None for one in held):
            return None
        parts = [layer.weight.data if one is None else one for one, layer in zip(held, self.layers, strict=True)]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        for module, one, part in zip(modules, held, whole.split(self.sizes), strict=True):
            if one is not None:
                setattr(module, SUM, part)
        return whole

    def stack(self, adapters: Beside) -> None:
        """Moves the weights and every A into one tensor, of which they become views."""
        ranks, weights = sum(adapters.ranks), [*self.weights, *(pair.a for pair in adapters.pairs)]
        more = -(-ranks // ALIGNED) * ALIGNED
        self.whole = side_by_side([*weights, self.weight.new_zeros(more - ranks, self.weight.shape[1])])
        self.weight, adapters.a, _ = self.whole.split([self.rows, ranks, more - ranks])
        if self.bias is not None:
            self.whole_bias = side_by_side([*self.biases, self.bias.new_zeros(more)])
            self.bias = self.whole_bias[: self.rows]

    def refresh(self) -> None:
        """Reads the weights of a layer by itself again, after they were given other memory."""
        if len(self.layers) == 1:
            self.weight = self.weights[0].data
            self.bias = self.biases[0].data if self.biased else None

    @property
    def weights(self) -> list[nn.Parameter]:
        return [layer.weight for layer in self.layers]

    @property
    def biases(self) -> list[nn.Parameter]:
        return [layer.bias for layer in self.layers] if self.biased else []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters in the order in which `JoinedStep.gradients` has their gradients."""
        return self.weights + self.biases + (self.adapters.parameters if self.adapters else [])

    def __call__(self, x: Tensor, adapted: bool) -> Tensor:
        return self.forward(x, adapted, keeps=False)[0]

    def forward(self, x: Tensor, adapted: bool, keeps: bool) -> tuple[Tensor, Tensor | None]:
        """Returns y ``[T, rows]``, between whose rows there may be other numbers, and A x for `JoinedStep.gradients`,
        where adapters are on and if `keeps`."""
        adapters = self.adapters if adapted and self.merged is None else None
        product = exact_linear if self.exact else linear
        if adapters and self.whole is not None:
            both = product(x, self.whole, self.whole_bias)
            y, low = both[:, : self.rows], both[:, self.rows : self.rows + len(adapters.a)]
        else:
            y = product(x, self.read(adapted), self.bias) if self.ordered is None else self.ordered(x)
            low = product(x, adapters.a) if adapters else y
        return y, adapters.add(y, low, keeps) if adapters else None

    def read(self, adapted: bool) -> Tensor:
        """Returns the weights of the product: merged ones where adapters are on and layers hold those."""
        return self.weight if self.merged is None or not adapted else self.merged

    def in_parts(self, x: Tensor, adapted: bool) -> Tensor:
        """Computes the product of a decode step: for few rows in float32 parts ``[parts, T, N]``, which `add_norm` adds
        up."""
        return thin_parts(x, self.read(adapted)) if self.is_thin(x, adapted) else self(x, adapted)

    def gated(self, x: Tensor, activation: str, adapted: bool) -> Tensor:
        """Computes an MLP's two projections in a decode step, with the gate applied."""
        if self.is_thin(x, adapted) and len(x) <= MOST_GATED_ROWS:
            return thin_gated(x, self.read(adapted), activation)
        return gated(self(x, adapted), activation)

    def is_thin(self, x: Tensor, adapted: bool) -> bool:
        beside = self.adapters is not None and adapted and self.merged is None
        return not (self.exact or self.biased or beside) and can_launch(x) and is_thin(x, self.weight)

    def room(self, adapted: bool) -> int:
        """Returns how many columns more `backward` wants behind dy, for the gradient of A x."""
        return len(self.whole) - self.rows if adapted and self.whole is not None else 0

    def backward(self, dy: Tensor, adapted: bool) -> JoinedStep:
        """`dy` may have as many columns more as `room` says. One without them is copied to where they are: an output
        projection's is no wider than the gradient of x, which would be read and written once more instead."""
        if not self.adapters or not adapted:
            return JoinedStep(self, dy, dy @ self.weight)
        if self.whole is None:
            dlow = self.adapters.backward(dy, dy.new_empty(len(dy), len(self.adapters.a)))
            dx = dy @ self.read(adapted)
            return JoinedStep(self, dy, dx.addmm_(dlow, self.adapters.a) if self.merged is None else dx, dlow)
        if dy.shape[1] == self.rows:
            given, dy = dy, dy.new_empty(len(dy), len(self.whole))
            dy[:, : self.rows] = given
        end = self.rows + len(self.adapters.a)
        dlow = self.adapters.backward(dy[:, : self.rows], dy[:, self.rows : end])
        return JoinedStep(self, dy[:, : self.rows], dy[:, :end] @ self.whole[:end], dlow)

    def reads_input(self, adapted: bool) -> bool:
        """True if a backward reads x."""
        return trains(self.weights) or bool(self.adapters and adapted and trains(self.adapters.parameters))


@dataclass(eq=False)
class JoinedStep:
    """The backward of a `Joined`: the gradient of its input first, those of its parameters when x is known."""

    joined: Joined
    dy: Tensor
    dx: Tensor
    dlow: Tensor | None = None
    """The gradient of A x, where adapters were on."""

    def gradients(self, x: Tensor | None, low: Tensor | None) -> list[Tensor | None]:
        """`x` may be None where `reads_input` says no; `low` is A x, if `Joined.forward` kept it."""
        joined, adapters = self.joined, self.joined.adapters
        grads: list[Tensor | None] = [None] * len(joined.sizes)
        if x is not None and trains(joined.weights):
            grads = [*(self.dy.t() @ x).split(joined.sizes)]
        if trains(joined.biases):
            grads += self.dy.sum(0).split(joined.sizes)
        else:
            grads += [None] * len(joined.biases)
        if adapters and x is not None and self.dlow is not None and trains(adapters.parameters):
            low = linear(x, adapters.a) if low is None else low
            grads += adapters.gradients(self.dy, self.dlow, x, low)
        elif adapters:
            grads += [None] * len(adapters.parameters)
        return grads


class Beside:
    """Adapters of layers that read the same input, y_i += s_i B_i A_i x: one product with all A, and one with
    each B, on a GPU one launch for all B of one rank.

    Every B stays a matrix without gaps: optimizers write into the gaps of others.
    """

    def __init__(self, pairs: Sequence[AdapterPair | None], sizes: Sequence[int], exact: bool):
        self.exact = exact
        spans = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        found = [(pair, span) for pair, span in zip(pairs, spans, strict=True) if pair]
        self.pairs, self.columns = [pair for pair, _ in found], [span for _, span in found]
        self.ranks = [len(pair.a) for pair in self.pairs]
        self.a = side_by_side([pair.a for pair in self.pairs])
        self.scales = [pair.scale for pair in self.pairs]
        one_launch = can_launch(self.a) and len(set(self.ranks)) == 1
        self.b = side_by_side([pair.b for pair in self.pairs]) if one_launch else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [pair.a for pair in self.pairs] + [pair.b for pair in self.pairs]

    def each(self, low: Tensor, wide: Tensor) -> Iterator[tuple[AdapterPair, Tensor, Tensor]]:
        """Every pair with its columns of ``low [T, ranks]`` and of ``wide [T, sizes]``."""
        for pair, part, columns in zip(self.pairs, low.split(self.ranks, 1), self.columns, strict=True):
            yield pair, part, wide[:, columns]

    def add(self, y: Tensor, low: Tensor, keeps: bool) -> Tensor | None:
        """Adds to y, which is rounded once more. Returns A x without gaps if `keeps`: a part of y's memory would keep
        all of it."""
        if self.b is not None:
            return widen(y, low, self.b, self.columns, self.scales, keeps)
        for pair, u, part in self.each(low, y):
            if self.exact:
                part.add_(exact_linear(u, pair.b.data), alpha=pair.scale)
            else:
                part.addmm_(u, pair.b.data.t(), alpha=pair.scale)
        return low.contiguous() if keeps else None

    def backward(self, dy: Tensor, out: Tensor) -> Tensor:
        """Writes the gradient of A x to ``out [T, ranks]``."""
        if self.b is not None:
            narrow(dy, self.b, self.columns, self.scales, out)
        else:
            for pair, du, part in self.each(out, dy):
                du.addmm_(part, pair.b.data, beta=0, alpha=pair.scale)
        return out

    def gradients(self, dy: Tensor, dlow: Tensor, x: Tensor, low: Tensor) -> list[Tensor]:
        """Returns the gradients of every A, then of every B.

        A x was kept: to compute it again, x would be read once more, which is many times as large. One product for all
        B would compute blocks that nobody reads, and autograd copies gradients with gaps: that many launches again.
        """
        by_a = (dlow.t() @ x).split(self.ranks)
        by_b = [
            torch.empty_like(pair.b).addmm_(part.t(), u, beta=0, alpha=pair.scale)
            for pair, u, part in self.each(low, dy)
        ]
        return [*by_a, *by_b]


def apart(module: nn.Module) -> tuple[nn.Linear, AdapterPair | None]:
    """A projection's own layer, and its adapter if it has one."""
    layer, pair = module, None
    if hasattr(module, "base_layer"):
        layer = module.base_layer  # type: ignore[assignment]
        try:
            pair = AdapterPair.beside(module)
        except ValueError as reason:
            raise Unfit(f"a projection has {reason}") from None
    if type(layer) is not nn.Linear or type(layer.weight.data) is not Tensor:
        raise Unfit(f"a projection is a {type(layer).__name__}")
    if pair and not pair.a.dtype == pair.b.dtype == layer.weight.dtype:
        raise Unfit(f"its adapters are {pair.a.dtype} beside weights in {layer.weight.dtype}")
    return layer, pair


def trains(parameters: Sequence[nn.Parameter]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


@torch.no_grad()
def side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0].data
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
