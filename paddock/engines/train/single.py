"""The training engine for one device: a model, its optimizer, and the micro-batches that fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.device import device_of
from paddock.engines.train.base import LossFn, Outputs, Want
from paddock.engines.train.optim import Updater
from paddock.engines.train.settings import (
    Settings,
    actor_settings,
    critic_settings,
    model_source,
    reference_settings,
    refuse_unsupported,
    widest,
)
from paddock.errors import UserError
from paddock.models.load import load_backbone, load_causal_lm, model_folder
from paddock.models.packing import pack, pad
from paddock.models.token_stats import Head, token_stats
from paddock.models.value_head import ValueModel

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
            self.updater = Updater(model, settings.optim, self.compute_dtypes(), settings.total_steps)
            if settings.checkpointing:
                self.backbone.gradient_checkpointing_enable({"use_reentrant": False})

    @classmethod
    def for_actor(cls, config: Config, total_steps: int | None = None) -> SingleEngine:
        """`total_steps` is the number of optimizer steps of the run, if its schedule ends with it."""
        refuse_unsupported(config)
        device, model = device_of(config.trainer.device), config.actor_rollout_ref.model
        settings = actor_settings(config, device, total_steps)
        wide = widest(settings, config.actor_rollout_ref.actor.fsdp_config.model_dtype)
        source = model_source(model, "actor_rollout_ref.model")
        return cls(load_causal_lm(**source, dtype=wide, device=device), settings)

    @classmethod
    def for_reference(cls, config: Config) -> SingleEngine:
        """Frozen, and loaded in the type it computes in: weights stored in that type are mapped, not copied."""
        device, model = device_of(config.trainer.device), config.actor_rollout_ref.model
        settings = reference_settings(config, device)
        source = model_source(model, "actor_rollout_ref.model")
        return cls(load_causal_lm(**source, dtype=settings.compute, device=device), settings)

    @classmethod
    def for_critic(cls, config: Config, total_steps: int | None = None) -> SingleEngine:
        refuse_unsupported(config)
        device, model = device_of(config.trainer.device), config.critic.model
        settings = critic_settings(config, device, total_steps)
        wide = widest(settings, model.fsdp_config.model_dtype)
        critic = ValueModel(load_backbone(**model_source(model, "critic.model"), dtype=wide, device=device))
        critic.load_head(model_folder(str(model.path), "critic.model.path"))
        return cls(critic, settings)

    def compute_dtypes(self) -> dict[str, torch.dtype]:
        """Of the parameters that are narrowed; what transformers or the value head keep in float32 stays."""
        kept = {*(self.backbone._keep_in_fp32_modules or ()), *(self.backbone._keep_in_fp32_modules_strict or ())}
        kept.add("value_head")
        names = [name for name, _ in self.model.named_parameters()]
        return {name: self.settings.compute for name in names if kept.isdisjoint(name.split("."))}

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch.rows(part) for part in self.settings.budget.split(batch)]

    @torch.no_grad()
    def forward(self, batch: Batch, want: Want) -> Outputs:
        found: dict[str, Tensor] = {}
        for part in self.settings.forward_budget.split(batch):
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
            share, metrics = loss(micro.to(self.device), self.outputs(micro, want))
            if share.requires_grad:  # not so where no token of the micro-batch counts
                share.backward()
            for name, value in ({"loss": share.detach()} | metrics).items():
                value = torch.as_tensor(value, dtype=torch.float64, device=self.device)
                sums[name] = sums[name] + value if name in sums else value
        sums["grad_norm"] = self.updater.clip().double()
        numbers = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))  # the step's one wait
        numbers |= {"lr": self.updater.lr, "skipped": 0.0}
        if math.isfinite(numbers.pop("loss")) and math.isfinite(numbers["grad_norm"]):
            self.updater.step()
        else:
            numbers["skipped"] = 1.0
        self.updater.zero()
        self.model.eval()
        return numbers

    def outputs(self, batch: Batch, want: Want) -> Outputs:
        inputs = (pack if self.settings.packed else pad)(batch, self.device)
        if len(inputs.states) == 0:
            return Outputs(**{name: torch.zeros(inputs.shape, device=self.device) for name in want})
        hidden = inputs.hidden(self.backbone)
        if isinstance(self.model, ValueModel):
            return Outputs(values=inputs.per_token(self.model.values(hidden)))
        stats = token_stats(
            hidden,
            Head.of(self.model),
            inputs.targets,
            self.settings.temperature,
            entropy="entropy" in want,
            sum_pi_squared="sum_pi_squared" in want,
        )
        return Outputs(**{name: inputs.per_token(getattr(stats, name)) for name in want})

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What the model computes with; a head tied to the embedding comes once, as the embedding."""
        yield from ((name, param.detach()) for name, param in self.model.named_parameters())
        stored = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in stored)

    def move(self, where: Literal["device", "host"]) -> None:
        """What the settings let leave the device while the role is idle. On a CPU there is nowhere to go."""
        target = self.device if where == "device" else torch.device("cpu")
        if self.settings.offload_params:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.data = tensor.data.to(target, non_blocking=True)
        if self.settings.offload_optimizer and self.updater is not None:
            self.updater.move(target)

    def save(self, path: Path) -> None:
        """Weights as `transformers` loads them, in their widest type; the optimizer's state and step beside them."""
        path.mkdir(parents=True, exist_ok=True)
        weights = dict(self.weights())
        if self.updater is not None:
            weights |= self.updater.named_masters()
            torch.save(self.updater.state(), path / OPTIMIZER_FILE)
        weights = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
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
            self.updater.load_state(torch.load(path / OPTIMIZER_FILE, map_location=self.device, weights_only=True))
        stored = self.stored_weights(path)
        for name, tensor in own.items():
            tensor.copy_(stored[name])
        if self.updater is not None:
            self.updater.publish()

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
