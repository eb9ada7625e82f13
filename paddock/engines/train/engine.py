"""The training engine: micro-batches that fit, the loss, the optimizer step, checkpoints; over a backend."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from paddock.core.batch import Batch
from paddock.core.device import CopyStream
from paddock.core.processes import is_first
from paddock.engines.train.base import Backend, LossFn, Outputs, Residency, Want, join_shares
from paddock.engines.train.offload import Offload, offloads_of, with_state_on_device
from paddock.engines.train.optim import whole
from paddock.engines.train.routers import Routers
from paddock.engines.train.settings import Budget
from paddock.models.adapters import MERGED, is_adapter
from paddock.models.value_head import HEAD_FILE, ValueModel


class Engine:
    """Trains or runs a model over a backend: all that other packages may ask of it. Over ranks, every rank makes each
    call. A causal LM gives log-probs, entropy and sum_pi_squared, a `ValueModel` values."""

    offload: Offload | None = None
    """Moves idle weights to the host. On a CPU there is none."""

    def __init__(self, backend: Backend):
        self.backend, self.name, self.settings = backend, backend.name, backend.settings
        self.device, self.model, self.adapters = backend.device, backend.model, backend.adapters
        self.updater, self.adapters_off = backend.updater, False
        if self.device.type != "cpu":
            offload_idle(self)

    @property
    def rollout_model(self) -> Any:
        """Returns the transformers module that generates. Its weights may be read inside `gathered` only."""
        return self.backend.gathered_model.model if self.backend.gathered_model else self.model

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Holds all weights in `rollout_model` for the block."""
        gathered_model = self.backend.gathered_model
        if gathered_model:
            gathered_model.fill(self.backend.tensors())
        try:
            yield
        finally:
            if gathered_model:
                gathered_model.drop()

    def without_adapters(self, budget: Budget) -> Self:
        """Returns the frozen model under this one's adapters, with micro-batches of its own, in the same memory."""
        other = copy.copy(self)
        other.settings = replace(self.settings, optim=None, forward_budget=budget)
        other.updater, other.adapters_off = None, True
        other.backend = copy.copy(self.backend)
        other.backend.routers = Routers(self.model, None)  # another policy: its experts are its own
        return other

    @torch.no_grad()
    def forward(self, batch: Batch, want: Want) -> Outputs:
        """Computes outputs without gradient, in micro-batches of its own choice. Column t is response token t."""
        parts = self.backend.parts(batch, self.settings.forward_budget)
        columns: dict[str, Any] = {}
        with self.backend.without_adapters() if self.adapters_off else nullcontext():
            found = self.backend.forward([batch.rows(part) for part in parts], want)
            for part, (_, outputs) in zip(parts, found, strict=True):
                for name in want:
                    values = getattr(outputs, name)
                    column = columns.setdefault(name, values.new_zeros(len(batch), *values.shape[1:]))
                    column[part.to(self.device)] = values
        return Outputs(**{name: column.to(batch.row.device) for name, column in columns.items()})

    def micro_batches(self, batch: Batch, parts: list[Tensor] | None = None) -> list[Batch]:
        """Cuts a mini-batch to the token budget or row count, or into `parts` of row indices; as many on every rank."""
        if parts is None:
            parts = self.backend.parts(batch, self.settings.budget)
        else:
            most = max(self.everyones(len(parts)))
            parts = [*parts, *[torch.empty(0, dtype=torch.long)] * (most - len(parts))]
        return [batch.rows(part) for part in parts]

    def train_step(self, micro_batches: list[Batch], loss: LossFn, want: Want) -> dict[str, float]:
        """Takes one optimizer step: zero, forward and backward of each micro-batch, clip, step.

        Joins the metrics' shares; adds `grad_norm`, `lr` and `skipped` (1.0 if a non-finite loss or gradient made the
        step void).
        """
        assert self.updater is not None, "the weights of this engine are frozen"
        routers = self.backend.routers
        self.model.train()
        self.updater.zero()
        self.updater.begin()
        routers.begin(self.backend, micro_batches, want)
        sums = self._backward(micro_batches, loss, want)
        sums["grad_norm"] = self.updater.clip().to(self.device).double()  # gradients may be on the host: offload_policy
        numbers = self._numbers(sums) | routers.finish(self.device) | {"lr": self.updater.lr, "skipped": 0.0}
        if math.isfinite(numbers.pop("loss")) and math.isfinite(numbers["grad_norm"]):
            self.updater.step()
            self._renew()
            if self.offload:  # what is not trained is on the host as it is here, once it has been there
                self.offload.written([*self.updater.params, *self.model.buffers()])
        else:
            numbers["skipped"] = 1.0
        self.updater.zero()
        self.model.eval()
        return numbers

    def advance(self) -> None:
        """Advances the schedule of the learning rate: by one for each step of the run, whatever mini-batches it has."""
        assert self.updater is not None, "the weights of this engine are frozen"
        self.updater.step_no += 1

    def _backward(self, micro_batches: list[Batch], loss: LossFn, want: Want) -> dict[str, Tensor]:
        """Adds the gradients of all micro-batches; returns the sums of the loss and of the metrics."""
        sums = {"loss": torch.zeros((), dtype=torch.float64, device=self.device)}
        for micro, outputs in self.backend.forward(micro_batches, want):
            share, metrics = torch.zeros((), device=self.device), dict[str, Tensor]()
            if len(micro):
                share, metrics = loss(micro.to(self.device), outputs)
                share = self.backend.routers.added(share, outputs.routing)
            if not share.requires_grad and self.backend.spans_ranks:  # nothing counts here, but the others run backward
                share = share + torch.stack([getattr(outputs, name).sum() for name in sorted(want)]).sum() * 0.0
            if share.requires_grad:
                self.backend.backward(share)
            for name, value in ({"loss": share.detach()} | metrics).items():
                value = torch.as_tensor(value, dtype=torch.float64, device=self.device)
                sums[name] = join_shares(name, sums[name], value) if name in sums else value
        return sums

    def _numbers(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Joins the sums of all ranks; the norm of the gradient is already that of all."""
        own = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))  # the step's one wait
        norm = own.pop("grad_norm")
        total: dict[str, float] = {}
        for shares in self.everyones(own):
            for name, value in shares.items():
                total[name] = join_shares(name, total[name], value) if name in total else value
        return total | {"grad_norm": norm}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors as the model computes with them, under Hugging Face names, with adapters merged.

        A head that is tied to the embedding comes once, as the embedding. Every rank must read to the end.
        """
        tensors = self.backend.tensors()
        yield from self.adapters.merged(tensors) if self.adapters else tensors

    def everyones(self, thing: Any) -> list[Any]:
        """Returns what each rank with rows of its own gives."""
        return self.backend.everyones(thing)

    def move(self, where: Residency) -> None:
        """Moves the offloadable weights. "host" also moves the optimizer state, which returns when a step begins."""
        if where == "host":
            for offload in offloads_of(self):
                offload.to_host()
        elif self.offload:
            self.offload.prefetch()
            if where == "device":
                self.offload.wait()

    @with_state_on_device
    def export(self, path: Path) -> None:
        """Writes the model as `transformers` loads it, in the type it computes in, without optimizer state."""
        self.backend.save_model(path, self.weights())
        self.everyones(None)  # no rank goes on before all is written

    @with_state_on_device
    def save(self, path: Path) -> None:
        """Writes what `load` reads, and the model or adapter in a form that `transformers` or `peft` loads."""
        path.mkdir(parents=True, exist_ok=True)
        if self.updater is not None:
            self.backend.save_state(path)
        if self.adapters:
            self.save_adapter(path, writes=is_first())
        if self.settings.saves_merged or not self.adapters:
            masters = self.updater.named_masters() if self.updater and not self.backend.spans_ranks else {}
            widest = ((name, masters.get(name, tensor)) for name, tensor in self.weights())
            self.backend.save_model(path / MERGED if self.adapters else path, widest)
        self.everyones(None)  # no rank goes on before all is written

    @with_state_on_device
    def save_adapter(self, path: Path, writes: bool = True) -> None:
        """Writes the adapter as `peft` loads it, if it `writes`; the value head of a critic beside it."""
        assert self.adapters is not None
        adapter, head = adapter_of(self), {}
        if isinstance(self.model, ValueModel):
            head = {name: whole(param.detach()) for name, param in self.model.value_head.named_parameters()}
        if writes:
            self.adapters.save(path, adapter)
        if writes and head:
            save_file({name: tensor.cpu().contiguous() for name, tensor in head.items()}, path / HEAD_FILE)

    @with_state_on_device
    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Reads what `save` wrote, so that training goes on as if it had not stopped."""
        for offload in offloads_of(self):
            offload.written()
        self.backend.load(path)
        self._renew()

    def _renew(self) -> None:
        """Follows a change of the adapters, where layers compute by merged weights."""
        if self.adapters and self.settings.computes_merged:
            self.adapters.renew()


def adapter_of(engine: Engine) -> dict[str, Tensor]:
    """Returns the adapters' tensors, whole and in their widest type."""
    own = engine.updater.named_masters() if engine.updater else dict(engine.model.named_parameters())
    return {name: whole(tensor.detach()) for name, tensor in own.items() if is_adapter(name)}


def offload_idle(engine: Engine, **options: Any) -> None:
    """Lets `Engine.move` move what the settings name, each part over a copy stream of its own."""
    model, updater = engine.model, engine.updater
    if engine.settings.offload_params:
        engine.offload = Offload(CopyStream(engine.device), lambda: [*model.parameters(), *model.buffers()], **options)
    if engine.settings.offload_optimizer and updater is not None:
        updater.offload = Offload(CopyStream(engine.device), updater.idle_tensors, **options)
