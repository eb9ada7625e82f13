"""The optimizer step of a model in parts: what each rank sums with whom, and which of the masters it keeps.

Parameters of a kind lie end to end in one buffer, so that a step takes one collective for each kind and direction. With
the distributed optimizer a rank keeps the masters and the optimizer's state of its share of that buffer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paddock.config.engine import OptimConfig
from paddock.engines.train.megatron.layout import ParallelRanks
from paddock.engines.train.optim import Updater, make_optimizer

TIED = "output_layer.weight"
PER_HEAD = ("q_layernorm", "k_layernorm")
"""Every rank applies these to its own heads."""


@dataclass(frozen=True)
class Kind:
    """Holds what the parameters of one buffer have in common on this rank."""

    expert: bool
    partial: bool
    """True if ranks that share matrices each have a part of the gradient."""
    tied: bool
    """True if the first and the last stage both have it."""
    counted: bool
    """True if this rank counts it in the norm: one of the ranks with the same gradient does."""
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, param: nn.Parameter, ranks: ParallelRanks, tied: bool, dtype: torch.dtype) -> Kind:
        expert, split = getattr(param, "expert", False), getattr(param, "split_over_ranks", False)
        own = split or (ranks.expert_tensor if expert else ranks.tensor).rank() == 0
        partial = getattr(param, "sequence_parallel", False) or any(part in name for part in PER_HEAD)
        return cls(expert, partial and not expert, tied, own and not (tied and ranks.last), dtype)


class Buffer:
    """Holds parameters of one kind end to end, their gradients in float32, and the masters of a share of them."""

    def __init__(self, kind: Kind, params: list[nn.Parameter], ranks: ParallelRanks, spread: bool):
        self.kind, self.params, self.ranks = kind, params, ranks
        self.replicas = ranks.expert_replicas if kind.expert else ranks.replicas
        self.shares = self.replicas.size() if spread else 1
        size = sum(param.numel() for param in params)
        self.length = -(-size // self.shares) * self.shares
        wide = params[0].new_zeros(self.length)
        torch.cat([param.detach().flatten() for param in params], out=wide[:size])
        self.values = wide.to(kind.dtype)
        self.shares_values = wide.dtype == kind.dtype and self.shares == 1
        self.master = nn.Parameter(self.values if self.shares_values else self.own_share(wide).clone())
        self.grads: Tensor | None = None
        for param, part in zip(params, self.parts(), strict=True):
            param.data = self.values[part].view(param.shape)
            param.register_post_accumulate_grad_hook(self.collector(part))

    def parts(self) -> list[slice]:
        """Returns the part of the buffer that each parameter is a view of."""
        ends = torch.tensor([0, *(param.numel() for param in self.params)]).cumsum(0).tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    def own_share(self, whole: Tensor) -> Tensor:
        return whole.view(self.shares, -1)[self.replicas.rank() if self.shares > 1 else 0]

    def collector(self, part: slice) -> Callable[[Tensor], None]:
        def collect(param: Tensor) -> None:
            assert param.grad is not None
            if self.grads is None:
                self.grads = torch.zeros(self.length, dtype=torch.float32, device=param.device)
            self.grads[part] += param.grad.flatten()
            param.grad = None

        return collect

    def reduce(self) -> None:
        """Sums the gradient over all ranks that have a part of it; sets that of the masters."""
        if self.grads is None:  # no backward reached this rank's parameters, and it must take part all the same
            self.grads = torch.zeros(self.length, dtype=torch.float32, device=self.master.device)
        if self.kind.partial and self.ranks.tensor.size() > 1:
            dist.all_reduce(self.grads, group=self.ranks.tensor)
        if self.kind.tied:
            dist.all_reduce(self.grads, group=self.ranks.embedding)
        found = self.grads
        if self.shares > 1:
            found = torch.empty_like(self.own_share(self.grads))
            dist.reduce_scatter_tensor(found, self.grads, group=self.replicas)
        elif self.replicas.size() > 1:
            dist.all_reduce(found, group=self.replicas)
        self.grads, self.master.grad = None, found.to(self.master.dtype)

    def squares(self) -> Tensor:
        """Returns the sum of the gradient's squares; 0 if another rank counts it."""
        assert self.master.grad is not None
        total = self.master.grad.double().square().sum()
        once = self.kind.counted and (self.shares > 1 or self.replicas.rank() == 0)
        return total if once else torch.zeros_like(total)

    @torch.no_grad()
    def publish(self) -> None:
        """Gathers the masters of all ranks into the model's parameters."""
        if self.shares_values:
            return
        own = self.own_share(self.values)
        own.copy_(self.master)
        if self.shares > 1:
            dist.all_gather_into_tensor(self.values, own.clone(), group=self.replicas)


class SharedUpdater(Updater):
    """See `Updater`. `tied` names parameters that stand on two stages."""

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        compute: Mapping[str, torch.dtype],
        ranks: ParallelRanks,
        spread: bool,
        tied: frozenset[str] = frozenset(),
        total_steps: int | None = None,
    ):
        self.config, self.total_steps, self.step_no = config, total_steps, 0
        kinds: dict[Kind, list[nn.Parameter]] = {}
        for name, param in params:
            if param.requires_grad:
                dtype = compute.get(name, param.dtype)
                kinds.setdefault(Kind.of(name, param, ranks, name in tied, dtype), []).append(param)
        self.buffers = [Buffer(kind, own, ranks, spread) for kind, own in kinds.items()]
        self.params = tuple(param for buffer in self.buffers for param in buffer.params)
        self.masters = [buffer.master for buffer in self.buffers]
        self.names = tuple(str(number) for number in range(len(self.buffers)))
        self.optimizer = make_optimizer(config, self.masters)

    def clip(self) -> Tensor:
        for buffer in self.buffers:
            buffer.reduce()
        total = torch.stack([buffer.squares() for buffer in self.buffers]).sum()
        dist.all_reduce(total)  # experts and layers of other ranks are none of this one's
        norm = total.sqrt()
        scale = (self.config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        for master in self.masters:
            assert master.grad is not None
            master.grad.mul_(scale.to(master.grad.dtype))
        return norm.float()

    def publish(self) -> None:
        for buffer in self.buffers:
            buffer.publish()

    def zero(self) -> None:
        super().zero()
        for buffer in self.buffers:
            buffer.grads = None

    def own_masters(self) -> Iterator[Tensor]:
        return (buffer.master for buffer in self.buffers if not buffer.shares_values)
