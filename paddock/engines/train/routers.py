"""Routers of a model that has experts: their choices are replayed, balanced by a loss, and shown as metrics.

The loss that balances is that of the Switch Transformer, as transformers computes it, arXiv:2101.03961: over all layers
and tokens of a mini-batch, with N choosing tokens, C_e choices of expert e and S_e the sum of its probabilities,
L = E sum_e (C_e / N) (S_e / N). Gradients flow through S alone, so with the counts of the whole mini-batch at hand the
shares of micro-batches add up to it. Replayed choices are counted as they are; else a forward without gradient counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paddock.core.batch import Batch
from paddock.engines.train.outputs import EXPERT_COLUMNS, Outputs, Want
from paddock.errors import UserError
from paddock.models.experts import Experts, Routing, experts_of
from paddock.models.packing import Inputs


@dataclass(frozen=True)
class RouterSettings:
    replay: bool = False
    """Choices that a batch brings are made again."""
    balance: float = 0.0
    """Weight of the loss that balances."""


class Forward(Protocol):
    """The part of a backend that runs forward passes."""

    device: torch.device

    def inputs(self, batch: Batch) -> Inputs: ...

    def forward(self, micro_batches: list[Batch], want: Want) -> Iterator[tuple[Batch, Outputs]]: ...


class Routers:
    """Replays, balances and watches the routers of one model, if it has experts and `settings` are given.

    `over_ranks`: other ranks see other tokens, also those that share a sequence with this one.
    """

    def __init__(self, model: nn.Module, settings: RouterSettings | None, over_ranks: bool = False):
        self.settings, self.over_ranks = settings or RouterSettings(), over_ranks
        self.experts: Experts | None = experts_of(model) if settings else None
        if self.settings.replay and self.experts is None:
            raise UserError(
                "the model has no experts whose choice could be replayed",
                key="actor_rollout_ref.actor.router_replay.mode",
                fix="actor_rollout_ref.actor.router_replay.mode=disabled",
            )
        self.learning = False
        self.frequency: Tensor | None = None
        self.rows = 0.0
        self.seen: list[Routing] = []

    def watch(self, inputs: Inputs, batch: Batch, want: Want) -> Inputs:
        """Returns inputs of a forward that makes recorded choices, if there are any, and records those it made."""
        recorded = self.recorded(inputs.cells, batch)
        if self.experts is None or not (self.learning or recorded is not None or want & EXPERT_COLUMNS):
            return inputs
        counts = inputs.cells >= 0 if self.learning else None
        required = not self.learning or recorded is not None or self.settings.balance > 0
        return replace(inputs, routing=Routing(self.experts, recorded, counts, self.frequency, required))

    def recorded(self, cells: Tensor, batch: Batch) -> Tensor | None:
        """Returns recorded choices ``[T, layers, k]``; padding chooses what cell 0 chose, and expert 0 without rows."""
        if not self.settings.replay or batch.response_experts is None:
            return None
        table = torch.cat([batch.need("prompt_experts"), batch.response_experts], 1).flatten(0, 1)
        if len(table) == 0:  # a rank that has no rows runs one token of padding with the others
            table = table.new_zeros(1, *table.shape[1:])
        return table[cells.clamp(min=0).to(table.device)].to(cells.device)

    def columns(self, inputs: Inputs, batch: Batch, want: Want) -> dict[str, Any]:
        """Returns what a forward chose as columns of its batch; zeros at tokens that were not computed."""
        if not want & EXPERT_COLUMNS:
            return {}
        assert self.experts is not None, "the model has no experts"
        rows, prompt = batch.prompts.shape
        width = prompt + inputs.shape[1]
        shape = rows * width, self.experts.layers, self.experts.top_k
        whole = torch.zeros(shape, dtype=self.experts.dtype, device=inputs.cells.device)
        if inputs.routing is not None and inputs.routing.ids:
            kept = inputs.cells >= 0
            whole[inputs.cells[kept]] = inputs.routing.chosen()[kept]
        prompts, responses = whole.view(rows, width, *shape[1:]).split([prompt, inputs.shape[1]], 1)
        return {"prompt_experts": prompts, "response_experts": responses}

    def begin(self, model: Forward, micro_batches: Sequence[Batch], want: Want) -> None:
        """Prepares an optimizer step; counts the choices of its micro-batches, if the loss that balances needs them."""
        if self.experts is None:
            return
        self.learning, self.seen, self.frequency = True, [], None
        if self.settings.balance:
            load = self.counted(model, micro_batches, want)
            if self.over_ranks:
                dist.all_reduce(load)
            self.rows = float(load.sum()) / self.experts.top_k
            self.frequency = (load.sum(0) / max(self.rows, 1.0)).float()

    @torch.no_grad()
    def counted(self, model: Forward, micro_batches: Sequence[Batch], want: Want) -> Tensor:
        assert self.experts is not None
        load = torch.zeros(self.experts.layers, self.experts.count, dtype=torch.float64, device=model.device)
        for micro in micro_batches:
            if self.settings.replay and micro.response_experts is not None:
                inputs = self.watch(model.inputs(micro), micro, want)
                routing = inputs.routing
                assert routing is not None and routing.replay is not None
                routing.ids = {index: routing.replay[:, index].long() for index in range(self.experts.layers)}
            else:
                routing = next(model.forward([micro], want))[1].routing
            if routing is not None:
                load += routing.load()
        return load

    def added(self, share: Tensor, routing: Routing | None) -> Tensor:
        """Adds the routers' share of the loss to that of a micro-batch."""
        if routing is None or not self.learning:
            return share
        self.seen.append(routing)
        if self.frequency is None:
            return share
        return share + self.settings.balance * self.scale * torch.stack(list(routing.pressure.values())).sum()

    @property
    def scale(self) -> float:
        """Returns the factor from sums of probabilities, each times its expert's frequency, to the loss."""
        assert self.experts is not None
        return self.experts.count / max(self.rows, 1.0)

    @torch.no_grad()
    def finish(self, device: torch.device) -> dict[str, float]:
        """Ends an optimizer step; returns metrics of the routers of all ranks."""
        if self.experts is None:
            return {}
        layers, count = self.experts.layers, self.experts.count
        sums = torch.zeros(layers * count + 3, dtype=torch.float64, device=device)
        for routing in self.seen:
            found = [sum_of(part) for part in (routing.entropy, routing.agreed, routing.pressure)]
            sums[:-3] += routing.load().flatten()
            sums[-3:] += torch.tensor(found, dtype=torch.float64, device=device)
        self.learning, self.seen = False, []
        if self.over_ranks:
            dist.all_reduce(sums)
        whole = sums.cpu()
        load, (entropy, agreed, pressure) = whole[:-3].view(layers, count), whole[-3:].tolist()
        rows = float(load.sum()) / self.experts.top_k
        if rows == 0:
            return {}
        metrics = {
            "router_entropy": entropy / rows,
            "router_load_max": float((load.amax(1) / load.mean(1)).max()),
            "router_dead_experts": float((load == 0).sum()),
        }
        if self.settings.replay:
            metrics["router_replay_agreement"] = agreed / rows
        if self.frequency is not None:
            metrics["aux_loss"] = self.scale * pressure
        return metrics


def sum_of(parts: dict[int, Tensor]) -> float:
    return float(torch.stack(list(parts.values())).sum()) if parts else 0.0
