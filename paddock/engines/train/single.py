"""The training engine for one device: a model, its optimizer, and the micro-batches that fit."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paddock.config.engine import OptimConfig
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.device import device_of
from paddock.engines.train.base import SHARDS, LossFn, Outputs, Want
from paddock.engines.train.optim import Updater
from paddock.engines.train.settings import (
    Budget,
    Settings,
    actor_settings,
    critic_settings,
    model_source,
    reference_settings,
    refuse_unsupported,
)
from paddock.errors import UserError
from paddock.models.fused import fuse, fused
from paddock.models.load import load_backbone, load_causal_lm, model_folder
from paddock.models.packing import Inputs, pack, pad
from paddock.models.token_stats import Head, token_stats
from paddock.models.value_head import ValueModel

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.pt"


class SingleEngine:
    """See `TrainEngine`. A causal LM gives log-probs, entropy and sum_pi_squared, a `ValueModel` values."""

    def __init__(self, model: PreTrainedModel | ValueModel, settings: Settings):
        self.model = model
        self.settings = settings
        self.backbone: PreTrainedModel = model.backbone if isinstance(model, ValueModel) else model
        self.device = self.backbone.device
        self.updater: Updater | None = None
        if settings.deterministic:
            torch.use_deterministic_algorithms(True)
        if settings.optim is None:
            model.requires_grad_(False)
        else:
            self.updater = self.make_updater(settings.optim)
            if settings.checkpointing:
                self.backbone.gradient_checkpointing_enable({"use_reentrant": False})
        self.fuse()

    def fuse(self) -> None:
        """A forward in few kernels, on a GPU and where the model is one that they compute right."""
        reason = fuse(self.backbone, self.settings.exact) if type(self) is SingleEngine else "its weights are sharded"
        if reason and self.settings.exact:
            raise UserError(
                f"{self.backbone.config.model_type} runs by its modules' own forward: {reason}",
                key="actor_rollout_ref.numerics",
                value="exact",
                fix="actor_rollout_ref.numerics=fast",
            )
        if reason and self.device.type != "cpu":
            log.info("%s runs by its modules' own forward: %s", self.backbone.config.model_type, reason)

    @classmethod
    def for_actor(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        """`total_steps` is the number of optimizer steps of the run, if its schedule ends with it."""
        refuse_unsupported(config)
        device, model = device_of(config.trainer.device), config.actor_rollout_ref.model
        settings = actor_settings(config, device, total_steps)
        source = model_source(model, "actor_rollout_ref.model")
        return cls(cls.read(load_causal_lm, source, settings.wide, device), settings, **place)

    @classmethod
    def for_reference(cls, config: Config, **place: Any) -> Self:
        """Frozen, and loaded in the type it computes in: weights stored in that type are mapped, not copied."""
        device, model = device_of(config.trainer.device), config.actor_rollout_ref.model
        settings = reference_settings(config, device)
        source = model_source(model, "actor_rollout_ref.model")
        return cls(cls.read(load_causal_lm, source, settings.wide, device), settings, **place)

    @classmethod
    def for_critic(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        refuse_unsupported(config)
        device, model = device_of(config.trainer.device), config.critic.model
        settings = critic_settings(config, device, total_steps)
        critic = ValueModel(cls.read(load_backbone, model_source(model, "critic.model"), settings.wide, device))
        critic.load_head(model_folder(str(model.path), "critic.model.path"))
        return cls(critic, settings, **place)

    @classmethod
    def read(
        cls, loader: Callable[..., PreTrainedModel], source: dict[str, Any], dtype: torch.dtype, device: torch.device
    ) -> PreTrainedModel:
        return loader(**source, dtype=dtype, device=device)

    def make_updater(self, optim: OptimConfig) -> Updater:
        return Updater(self.model, optim, self.compute_dtypes(), self.settings.total_steps)

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """Of the parameters that are narrowed; what transformers or the value head keep in float32 stays."""
        kept = {*(self.backbone._keep_in_fp32_modules or ()), *(self.backbone._keep_in_fp32_modules_strict or ())}
        kept.add("value_head")
        names = [name for name, _ in self.model.named_parameters()]
        return {name: self.settings.compute for name in names if kept.isdisjoint(name.split("."))}

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch.rows(part) for part in self.parts(batch, self.settings.budget)]

    def parts(self, batch: Batch, budget: Budget) -> list[Tensor]:
        return budget.split(batch)

    @torch.no_grad()
    def forward(self, batch: Batch, want: Want) -> Outputs:
        found: dict[str, Tensor] = {}
        for part in self.parts(batch, self.settings.forward_budget):
            outputs = self.outputs(batch.rows(part), want)
            for name in want:
                values = getattr(outputs, name)
                whole = found.setdefault(name, values.new_zeros(len(batch), values.shape[1]))
                whole[part.to(self.device)] = values
        return Outputs(**{name: values.to(batch.row.device) for name, values in found.items()})

    def train_step(self, micro_batches: list[Batch], loss: LossFn, want: Want) -> dict[str, float]:
        assert self.updater is not None, "the weights of this engine are frozen"
        self.model.train()
        self.updater.zero()
        sums: dict[str, Tensor] = {}
        for micro in micro_batches:
            share, metrics = self.share(micro, loss, want)
            if share.requires_grad:  # not so where no token of the micro-batch counts
                share.backward()
            for name, value in ({"loss": share.detach()} | metrics).items():
                value = torch.as_tensor(value, dtype=torch.float64, device=self.device)
                sums[name] = sums[name] + value if name in sums else value
        sums["grad_norm"] = self.updater.clip().double()
        numbers = self.numbers(sums) | {"lr": self.updater.lr, "skipped": 0.0}
        if math.isfinite(numbers.pop("loss")) and math.isfinite(numbers["grad_norm"]):
            self.updater.step()
        else:
            numbers["skipped"] = 1.0
        self.updater.zero()
        self.model.eval()
        return numbers

    def share(self, micro: Batch, loss: LossFn, want: Want) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(micro.to(self.device), self.outputs(micro, want))

    def numbers(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))  # the step's one wait

    def inputs(self, batch: Batch) -> Inputs:
        return (pack if self.settings.packed else pad)(batch, self.device)

    def outputs(self, batch: Batch, want: Want) -> Outputs:
        inputs = self.inputs(batch)
        if len(inputs.states) == 0:
            return Outputs(**{name: torch.zeros(inputs.shape, device=self.device) for name in want})
        found = per_state(self.model, inputs, want, self.settings.temperature)
        return Outputs(**{name: inputs.per_token(values) for name, values in found.items()})

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What the model computes with; a head tied to the embedding comes once, as the embedding."""
        yield from ((name, param.detach()) for name, param in self.model.named_parameters())
        stored = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in stored)

    @property
    def rollout_model(self) -> Any:
        """What generates: this very model."""
        return self.model

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All weights are in `rollout_model` for the time of the block, as they always are here."""
        yield

    def everyones(self, thing: Any) -> list[Any]:
        return [thing]

    def move(self, where: Literal["device", "host"]) -> None:
        """What the settings let leave the device while the role is idle. On a CPU there is nowhere to go."""
        target = self.device if where == "device" else torch.device("cpu")
        if self.settings.offload_params:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.data = tensor.data.to(target, non_blocking=True)
            if decoder := fused(self.backbone):
                decoder.moved(back=where == "device")
        if self.settings.offload_optimizer and self.updater is not None:
            self.updater.move(target)

    def save(self, path: Path) -> None:
        """Weights as `transformers` loads them, in their widest type; the optimizer's state and step beside them."""
        path.mkdir(parents=True, exist_ok=True)
        weights = dict(self.weights())
        if self.updater is not None:
            weights |= self.updater.named_masters()
            torch.save(self.updater.state(), path / OPTIMIZER_FILE)
        weights = {name: alone(tensor.detach()) for name, tensor in weights.items()}
        if isinstance(self.model, ValueModel):
            self.model.save(path, weights)
        else:
            self.model.save_pretrained(path, state_dict=weights)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """What `save` wrote: from there training goes on as if it had not stopped."""
        own = dict(self.weights())
        if self.updater is not None:
            own |= self.updater.named_masters()
        if (path / SHARDS).is_dir():  # written by several ranks
            from paddock.engines.train.shards import load_shards  # takes a second to import

            load_shards(path / SHARDS, own, self.updater)
        else:
            self.load_whole(path, own)
        if self.updater is not None:
            self.updater.publish()

    def load_whole(self, path: Path, own: dict[str, Tensor]) -> None:
        if self.updater is not None:
            self.updater.load_state(torch.load(path / OPTIMIZER_FILE, map_location=self.device, weights_only=True))
        stored = self.stored_weights(path)
        for name, tensor in own.items():
            tensor.copy_(stored[name])

    def stored_weights(self, path: Path) -> dict[str, Tensor]:
        """Read by transformers, which knows where a family's files differ from its modules."""
        config = copy.deepcopy(self.backbone.config)
        try:
            backbone, report = type(self.backbone).from_pretrained(
                path, config=config, dtype=torch.float32, output_loading_info=True
            )
            strange = sorted([*report["missing_keys"], *report["unexpected_keys"]])
        except RuntimeError as error:  # shapes that differ
            strange = str(error).splitlines()[:1]
        if strange:
            raise UserError(
                f"the checkpoint {path} holds another model: {', '.join(strange[:3])}",
                key="trainer.resume_mode",
                fix="resume with the model it was made with, or set trainer.resume_mode=disable",
            )
        if not isinstance(self.model, ValueModel):
            return backbone.state_dict()
        critic = ValueModel(backbone)
        critic.load_head(path)
        return critic.state_dict()


def per_state(model: PreTrainedModel | ValueModel, inputs: Inputs, want: Want, temperature: float) -> dict[str, Tensor]:
    """``[N]`` values at the hidden states that the inputs ask for."""
    if isinstance(model, ValueModel):
        return {"values": model.values(inputs.hidden(model.backbone))}
    stats = token_stats(
        inputs.hidden(model),
        Head.of(model),
        inputs.targets,
        temperature,
        entropy="entropy" in want,
        sum_pi_squared="sum_pi_squared" in want,
    )
    return {name: getattr(stats, name) for name in want}


def alone(tensor: Tensor) -> Tensor:
    """Contiguous, and not a part of a larger tensor: files hold no views."""
    part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone(memory_format=torch.contiguous_format) if part else tensor.contiguous()
