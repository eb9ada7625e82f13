"""The training engine for one device: a model, its optimizer, and the micro-batches that fit."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from paddock.config.engine import OptimConfig
from paddock.config.plugins import import_plugin
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.device import Carrier, device_of, make_deterministic
from paddock.engines.train.activations import Activations
from paddock.engines.train.base import EXPERT_COLUMNS, SHARDS, LossFn, Outputs, Residency, Want, join_shares
from paddock.engines.train.offload import Offload, at_home
from paddock.engines.train.optim import Updater
from paddock.engines.train.routers import Routers
from paddock.engines.train.settings import (
    Budget,
    Settings,
    actor_settings,
    critic_settings,
    model_source,
    reference_settings,
)
from paddock.errors import UserError
from paddock.models.adapters import MERGED, Lora, adapters_of, attach, is_adapter, read
from paddock.models.fused import fuse
from paddock.models.load import load_backbone, load_causal_lm, load_tokenizer, model_folder
from paddock.models.packing import Inputs, pack, pad
from paddock.models.reward_head import load_reward_model
from paddock.models.sharing import pack_shared
from paddock.models.token_stats import Head, token_stats
from paddock.models.value_head import HEAD_FILE, ValueModel
from paddock.models.vision import freeze_tower

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.pt"
M = TypeVar("M")


class SingleEngine:
    """See `TrainEngine`. A causal LM gives log-probs, entropy and sum_pi_squared, a `ValueModel` values."""

    offload: Offload | None = None
    """Of the weights, while the role is idle. On a CPU there is nowhere to go."""

    def __init__(self, model: PreTrainedModel | ValueModel, settings: Settings):
        self.model = model
        self.settings = settings
        self.backbone: PreTrainedModel = model.backbone if isinstance(model, ValueModel) else model
        self.device = self.backbone.device
        self.adapters = adapters_of(self.backbone)
        self.adapters_off = False
        self.updater: Updater | None = None
        self.routers = Routers(self.backbone, settings.routers)
        self.activations: Activations | None = None
        if settings.offload_activations and self.device.type != "cpu":  # on a CPU there is nowhere to go
            self.activations = Activations(model, Carrier(self.device))
        if settings.deterministic:
            make_deterministic(self.device)
        if settings.optim is None:
            model.requires_grad_(False)
        else:
            self.updater = self.make_updater(settings.optim)
            if settings.checkpointing:
                self.backbone.gradient_checkpointing_enable({"use_reentrant": False})
        self.fuse()
        if self.device.type != "cpu":
            self.offload_idle(self.device)

    def fuse(self) -> None:
        """A forward in few kernels, where the model is one that they compute right."""
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
        device, model = device_of(config.trainer.device), config.actor_rollout_ref.model
        settings = actor_settings(config, device, total_steps)
        lora = Lora.of(model, "actor_rollout_ref.model", config.trainer.seed)
        source = model_source(model, "actor_rollout_ref.model")
        policy = cls.adapted(load_causal_lm, source, settings, device, lora)
        if config.actor_rollout_ref.actor.freeze_vision_tower:
            freeze_tower(policy, settings.compute)
        return cls(policy, settings, **place)

    @classmethod
    def for_reference(cls, config: Config, **place: Any) -> Self:
        """Frozen, and loaded in the type it computes in: weights stored in that type are mapped, not copied."""
        device, model = device_of(config.trainer.device), config.actor_rollout_ref.model
        settings = reference_settings(config, device)
        source = model_source(model, "actor_rollout_ref.model")
        return cls(cls.read(load_causal_lm, source, settings.wide, device), settings, **place)

    @classmethod
    def for_critic(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        device, model = device_of(config.trainer.device), config.critic.model
        if model.external_lib:
            import_plugin(model.external_lib, "critic.model.external_lib")
        settings = critic_settings(config, device, total_steps)
        lora = Lora.of(model, "critic.model", config.trainer.seed)
        critic = ValueModel(cls.adapted(load_backbone, model_source(model, "critic.model"), settings, device, lora))
        critic.load_head(model_folder(str(model.path), "critic.model.path"))
        return cls(critic, settings, **place)

    @classmethod
    def for_pairs(cls, config: Config, total_steps: int | None = None, **place: Any) -> Self:
        """A reward model to train on; a language model gets a head of zeros, which finds every answer equally good."""
        device, model = device_of(config.trainer.device), config.actor_rollout_ref.model
        settings = actor_settings(config, device, total_steps)
        lora = Lora.of(model, "actor_rollout_ref.model", config.trainer.seed)
        source = model_source(model, "actor_rollout_ref.model") | {"fresh_head": True}
        reward_model = cls.read(load_reward_model, source, settings.compute if lora else settings.wide, device)
        attach(reward_model.backbone, lora, settings.wide)
        tokenizer = load_tokenizer(
            config.data.tokenizer or model.tokenizer_path or model.path or "", model.trust_remote_code
        )
        return cls(reward_model.for_pairs(tokenizer.pad_token_id), settings, **place)

    @classmethod
    def adapted(
        cls,
        loader: Callable[..., PreTrainedModel],
        source: dict[str, Any],
        settings: Settings,
        device: torch.device,
        lora: Lora | None,
    ) -> PreTrainedModel:
        """A model to train. Under LoRA its own weights stay as they are, in the type in which they compute."""
        model = cls.read(loader, source, settings.compute if lora else settings.wide, device)
        return attach(model, lora, settings.wide)

    def without_adapters(self, budget: Budget) -> Self:
        """The frozen model under this one's adapters, with micro-batches of its own: no second one in memory."""
        assert self.adapters is not None
        other = copy.copy(self)
        other.settings = replace(self.settings, optim=None, forward_budget=budget)
        other.updater, other.adapters_off = None, True
        other.routers = Routers(self.backbone, None)  # another policy: its experts are its own
        return other

    @classmethod
    def read(cls, loader: Callable[..., M], source: dict[str, Any], dtype: torch.dtype, device: torch.device) -> M:
        """Loads a model or a part of one."""
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
        return budget.split(batch, self.shares_prompts)

    def as_many_everywhere(self, parts: list[Tensor]) -> list[Tensor]:
        """Returns the parts, with empty ones added if another rank has more."""
        return parts

    @torch.no_grad()
    def forward(self, batch: Batch, want: Want) -> Outputs:
        found: dict[str, Any] = {}
        for part in self.parts(batch, self.settings.forward_budget):
            with self.adapters.off() if self.adapters and self.adapters_off else nullcontext():
                outputs = self.outputs(batch.rows(part), want)
            for name in want:
                values = getattr(outputs, name)
                whole = found.setdefault(name, values.new_zeros(len(batch), *values.shape[1:]))
                whole[part.to(self.device)] = values
        return Outputs(**{name: values.to(batch.row.device) for name, values in found.items()})

    def train_step(self, micro_batches: list[Batch], loss: LossFn, want: Want) -> dict[str, float]:
        assert self.updater is not None, "the weights of this engine are frozen"
        self.model.train()
        self.updater.zero()
        self.updater.begin()
        self.routers.begin(self, micro_batches, want)
        sums = self.backward(micro_batches, loss, want)
        sums["grad_norm"] = self.updater.clip().double()
        numbers = self.numbers(sums) | self.routers.finish(self) | {"lr": self.updater.lr, "skipped": 0.0}
        if math.isfinite(numbers.pop("loss")) and math.isfinite(numbers["grad_norm"]):
            self.updater.step()
            self.weights_changed()
        else:
            numbers["skipped"] = 1.0
        self.updater.zero()
        self.model.eval()
        return numbers

    def weights_changed(self) -> None:
        """What is not trained is on the host as it is here, once it has been there."""
        assert self.updater is not None
        if self.offload:
            self.offload.written([*self.updater.params, *self.model.buffers()])

    def backward(self, micro_batches: list[Batch], loss: LossFn, want: Want) -> dict[str, Tensor]:
        """Gradients of all micro-batches, and the sums of the loss and of the metrics."""
        sums: dict[str, Tensor] = {}
        for micro in micro_batches:
            with self.activations.away() if self.activations else nullcontext():
                outputs = self.outputs(micro, want)
                share, metrics = self.nothing(outputs, want), dict[str, Tensor]()
                if len(micro):
                    share, metrics = loss(micro.to(self.device), outputs)
                    share = self.routers.added(share, outputs.routing)
                if not share.requires_grad:  # no token of the micro-batch counts
                    share = share + self.nothing(outputs, want)
            if share.requires_grad:
                share.backward()
            self.add_up(sums, {"loss": share.detach()} | metrics)
        return sums

    def add_up(self, sums: dict[str, Tensor], shares: dict[str, Tensor]) -> None:
        for name, value in shares.items():
            value = torch.as_tensor(value, dtype=torch.float64, device=self.device)
            sums[name] = join_shares(name, sums[name], value) if name in sums else value

    def nothing(self, outputs: Outputs, want: Want) -> Tensor:
        """Returns the loss of a micro-batch in which nothing counts: 0, which needs no backward here."""
        return torch.zeros((), device=self.device)

    def numbers(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))  # the step's one wait

    @cached_property
    def shares_prompts(self) -> bool:
        """Is a group's prompt computed once? Where it cannot be, that is refused if it was asked for."""
        why = self.why_prompts_are_not_shared()
        if why and self.settings.share_prompts:
            raise UserError(why, key="actor_rollout_ref.actor.use_prefix_grouper", value=True, fix="leave it out")
        return not why and self.settings.share_prompts is not False

    def why_prompts_are_not_shared(self) -> str | None:
        if not self.settings.packed:
            return "rows that are padded are computed alone"
        if self.settings.exact:
            return "exact numerics compute each row alone"
        return "balancing experts counts the tokens of each row" if self.routers.experts else None

    def inputs(self, batch: Batch) -> Inputs:
        shared = pack_shared(batch, self.device) if self.shares_prompts else None
        return shared or (pack if self.settings.packed else pad)(batch, self.device)

    def outputs(self, batch: Batch, want: Want) -> Outputs:
        inputs = self.routers.watch(self.inputs(batch), batch, want)
        said = want - EXPERT_COLUMNS
        if len(inputs.states) == 0:
            nothing: dict[str, Any] = {name: torch.zeros(inputs.shape, device=self.device) for name in said}
            return Outputs(**nothing, **self.routers.columns(inputs, batch, want))
        found = per_state(self.model, inputs, said, self.settings.temperature)
        columns: dict[str, Any] = {name: inputs.per_token(values) for name, values in found.items()}
        return Outputs(**columns, **self.routers.columns(inputs, batch, want), routing=inputs.routing)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What the model computes with, adapters merged; a head tied to the embedding comes once, as the embedding."""
        yield from self.adapters.merged(self.tensors()) if self.adapters else self.tensors()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same as the modules hold it: adapters on their own."""
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

    def total(self, sums: Tensor) -> Tensor:
        return sums

    def offload_idle(self, device: torch.device, **options: Any) -> None:
        """From now on `move` moves what the settings let leave the device, each over a road of its own."""
        if self.settings.offload_params:
            self.offload = Offload(Carrier(device), self.idle_weights, **options)
        if self.settings.offload_optimizer and self.updater is not None:
            self.updater.offload = Offload(Carrier(device), self.updater.idle_tensors, **options)

    def idle_weights(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()

    def offloads(self) -> list[Offload]:
        found = (self.offload, self.updater.offload if self.updater else None)
        return [offload for offload in found if offload is not None]

    def move(self, where: Residency) -> None:
        if where == "host":
            for offload in self.offloads():
                offload.leave()
        elif self.offload:
            self.offload.come()
            if where == "device":
                self.offload.arrive()

    @at_home
    def export(self, path: Path) -> None:
        """Writes the model as `transformers` loads it, in the type it computes in, without optimizer state."""
        weights = {name: tensor.contiguous() for name, tensor in self.weights()}
        self.backbone.save_pretrained(path, state_dict=weights)

    @at_home
    def save(self, path: Path) -> None:
        """Weights as `transformers` loads them, in their widest type; the optimizer's state and step beside them."""
        path.mkdir(parents=True, exist_ok=True)
        if self.updater is not None:
            torch.save(self.updater.state(), path / OPTIMIZER_FILE)
        if self.adapters:
            self.save_adapter(path)
            if self.settings.saves_merged:
                self.save_whole(path / MERGED, dict(self.weights()))
        else:
            self.save_whole(path, dict(self.tensors()) | (self.updater.named_masters() if self.updater else {}))

    def save_whole(self, path: Path, weights: dict[str, Tensor]) -> None:
        path.mkdir(exist_ok=True)
        weights = {name: alone(tensor.detach()) for name, tensor in weights.items()}
        if isinstance(self.model, ValueModel):
            self.model.save(path, weights)
        else:
            self.model.save_pretrained(path, state_dict=weights)

    def adapter(self) -> dict[str, Tensor]:
        """The adapters' tensors, whole and in their widest type."""
        own = self.updater.named_masters() if self.updater else dict(self.model.named_parameters())
        return {name: self.whole(tensor.detach()) for name, tensor in own.items() if is_adapter(name)}

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    @at_home
    def save_adapter(self, path: Path, writes: bool = True) -> None:
        """As `peft` loads it; a value head beside it."""
        assert self.adapters is not None
        adapter, head = self.adapter(), {}
        if isinstance(self.model, ValueModel):
            head = {name: self.whole(param.detach()) for name, param in self.model.value_head.named_parameters()}
        if writes:
            self.adapters.save(path, adapter)
        if writes and head:
            save_file({name: tensor.cpu().contiguous() for name, tensor in head.items()}, path / HEAD_FILE)

    @at_home
    @torch.no_grad()
    def load(self, path: Path) -> None:
        """What `save` wrote: from there training goes on as if it had not stopped."""
        self.all_changes()
        own = {} if self.adapters else dict(self.tensors())
        if self.updater is not None:
            own |= self.updater.named_masters()
        if (path / SHARDS).is_dir():  # written by several ranks
            from paddock.engines.train.shards import load_shards  # takes a second to import

            load_shards(path / SHARDS, own, self.updater)
        else:
            self.load_whole(path, own)
        if self.updater is not None:
            self.updater.publish()

    def all_changes(self) -> None:
        """No copy on the host is right any more."""
        for offload in self.offloads():
            offload.written()

    def load_whole(self, path: Path, own: dict[str, Tensor]) -> None:
        stored = self.stored_weights(path)  # first: another model's optimizer says less of what is wrong
        if self.updater is not None:
            self.updater.load_state(torch.load(path / OPTIMIZER_FILE, map_location=self.device, weights_only=True))
        for name, tensor in own.items():
            tensor.copy_(stored[name])

    def stored_weights(self, path: Path) -> dict[str, Tensor]:
        """Read by transformers, which knows where a family's files differ from its modules; of adapters, what is
        trained."""
        if self.adapters:
            return self.stored_adapter(path)
        config = copy.deepcopy(self.backbone.config)
        try:
            backbone, report = type(self.backbone).from_pretrained(
                path, config=config, dtype=torch.float32, output_loading_info=True
            )
            strange = sorted([*report["missing_keys"], *report["unexpected_keys"]])
        except RuntimeError as error:  # shapes that differ
            strange = str(error).splitlines()[:1]
        if strange:
            raise another_model(path, strange)
        if not isinstance(self.model, ValueModel):
            return backbone.state_dict()
        critic = ValueModel(backbone)
        critic.load_head(path)
        return critic.state_dict()

    def stored_adapter(self, path: Path) -> dict[str, Tensor]:
        own = {name: param for name, param in self.model.named_parameters() if is_adapter(name)}
        stored, strange = read(path, own)
        if strange:
            raise another_model(path, strange)
        head = load_file(path / HEAD_FILE) if isinstance(self.model, ValueModel) else {}
        return stored | {f"value_head.{name}": tensor for name, tensor in head.items()}


def another_model(path: Path, strange: list[str]) -> UserError:
    return UserError(
        f"the checkpoint {path} holds another model: {', '.join(strange[:3])}",
        key="trainer.resume_mode",
        fix="resume with the model it was made with, or set trainer.resume_mode=disable",
    )


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
