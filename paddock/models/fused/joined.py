"""Linear layers that read the same input as one product, with the adapters beside them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from paddock.kernels.launch import can_launch, has_triton
from paddock.models.adapters import Pair
from paddock.models.fused.passes import gated

if has_triton():
    from paddock.kernels.matmul import exact_linear
    from paddock.kernels.thin import MOST_GATED_ROWS, is_thin, thin_gated, thin_parts


class Unfit(Exception):
    """The model does something that the fused forward does not; the text says what."""


class Joined:
    """Linear layers that read the same input. Their parameters are parts of one tensor, so one product serves all.

    No gradient is computed for what is frozen.
    """

    def __init__(self, modules: Sequence[nn.Module], exact: bool):
        self.exact = exact
        self.layers, pairs = zip(*(apart(module) for module in modules), strict=True)
        self.sizes = [layer.out_features for layer in self.layers]
        self.biased = any(layer.bias is not None for layer in self.layers)
        if self.biased and not all(layer.bias is not None for layer in self.layers):
            raise Unfit("some projections have a bias and others have none")
        self.weight = side_by_side(self.weights)
        self.bias = side_by_side(self.biases) if self.biased else None
        self.adapters = Beside(pairs, self.sizes, exact) if any(pairs) else None
        self.ordered: Callable[[Tensor], Tensor] | None = None
        """The product, for a while, with weights in the order of a CPU; see prepacked.py."""

    def refresh(self) -> None:
        """After a parameter that stands alone was given other memory."""
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
        """The parameters in the order in which `Step.gradients` has their gradients."""
        return self.weights + self.biases + (self.adapters.parameters if self.adapters else [])

    def __call__(self, x: Tensor, adapted: bool) -> Tensor:
        if self.ordered is not None:
            y = self.ordered(x)
        else:
            y = exact_linear(x, self.weight, self.bias) if self.exact else linear(x, self.weight, self.bias)
        if self.adapters and adapted:
            self.adapters.add(y, x)
        return y

    def in_parts(self, x: Tensor, adapted: bool) -> Tensor:
        """Computes the product of a decode step: for few rows in float32 parts ``[parts, T, N]``, which `add_norm` adds
        up."""
        return thin_parts(x, self.weight) if self.is_thin(x, adapted) else self(x, adapted)

    def gated(self, x: Tensor, activation: str, adapted: bool) -> Tensor:
        """Computes an MLP's two projections in a decode step, with the gate applied."""
        if self.is_thin(x, adapted) and len(x) <= MOST_GATED_ROWS:
            return thin_gated(x, self.weight, activation)
        return gated(self(x, adapted), activation)

    def is_thin(self, x: Tensor, adapted: bool) -> bool:
        plain = not (self.exact or self.biased or (self.adapters and adapted))
        return plain and can_launch(x) and is_thin(x, self.weight)

    def backward(self, dy: Tensor, adapted: bool) -> Step:
        dx = dy @ self.weight
        if not self.adapters or not adapted:
            return Step(self, dy, dx)
        narrow = self.adapters.narrow_backward(dy)
        return Step(self, dy, dx.addmm_(narrow, self.adapters.a), narrow)

    def reads_input(self, adapted: bool) -> bool:
        """True if a backward reads x."""
        return trains(self.weights) or bool(self.adapters and adapted and trains(self.adapters.parameters))


@dataclass(eq=False)
class Step:
    """The backward of a `Joined`: the gradient of its input first, those of its parameters when x is known."""

    joined: Joined
    dy: Tensor
    dx: Tensor
    narrow: Tensor | None = None
    """The gradient of A x, where adapters were on."""

    def gradients(self, x: Tensor | None) -> list[Tensor | None]:
        """`x` may be None where `reads_input` says no."""
        joined, adapters = self.joined, self.joined.adapters
        grads: list[Tensor | None] = [None] * len(joined.sizes)
        if x is not None and trains(joined.weights):
            grads = [*(self.dy.t() @ x).split(joined.sizes)]
        if trains(joined.biases):
            grads += self.dy.sum(0).split(joined.sizes)
        else:
            grads += [None] * len(joined.biases)
        if adapters and x is not None and self.narrow is not None and trains(adapters.parameters):
            grads += adapters.gradients(self.dy, self.narrow, x)
        elif adapters:
            grads += [None] * len(adapters.parameters)
        return grads


class Beside:
    """Adapters of layers that read the same input, y_i += s_i B_i A_i x: one product with all A, a small one each."""

    def __init__(self, pairs: Sequence[Pair | None], sizes: Sequence[int], exact: bool):
        self.exact = exact
        spans = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        found = [(pair, span) for pair, span in zip(pairs, spans, strict=True) if pair]
        self.pairs, self.columns = [pair for pair, _ in found], [span for _, span in found]
        self.ranks = [len(pair.a) for pair in self.pairs]
        self.a = side_by_side([pair.a for pair in self.pairs])

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [pair.a for pair in self.pairs] + [pair.b for pair in self.pairs]

    def each(self, narrow: Tensor, wide: Tensor) -> Iterator[tuple[Pair, Tensor, Tensor]]:
        """Every pair with its columns of ``narrow [T, ranks]`` and of ``wide [T, sizes]``."""
        for pair, part, columns in zip(self.pairs, narrow.split(self.ranks, 1), self.columns, strict=True):
            yield pair, part, wide[:, columns]

    def add(self, y: Tensor, x: Tensor) -> None:
        """Into y, which is rounded once more."""
        narrow = exact_linear(x, self.a) if self.exact else linear(x, self.a)
        for pair, u, part in self.each(narrow, y):
            if self.exact:
                part.add_(exact_linear(u, pair.b.data), alpha=pair.scale)
            else:
                part.addmm_(u, pair.b.data.t(), alpha=pair.scale)

    def narrow_backward(self, dy: Tensor) -> Tensor:
        """The gradient of A x, ``[T, ranks]``."""
        narrow = dy.new_empty(len(dy), sum(self.ranks))
        for pair, du, part in self.each(narrow, dy):
            du.addmm_(part, pair.b.data, beta=0, alpha=pair.scale)
        return narrow

    def gradients(self, dy: Tensor, narrow: Tensor, x: Tensor) -> list[Tensor]:
        """Returns the gradients of every A, then of every B. A x is computed again, which costs less than keeping
        it."""
        by_a = (narrow.t() @ x).split(self.ranks)
        by_b = [
            torch.empty_like(pair.b).addmm_(part.t(), u, beta=0, alpha=pair.scale)
            for pair, u, part in self.each(linear(x, self.a), dy)
        ]
        return [*by_a, *by_b]


def apart(module: nn.Module) -> tuple[nn.Linear, Pair | None]:
    """A projection's own layer, and its adapter if it has one."""
    layer, pair = module, None
    if hasattr(module, "base_layer"):
        layer = module.base_layer  # type: ignore[assignment]
        try:
            pair = Pair.beside(module)
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
