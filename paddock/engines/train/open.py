"""Makes the training engine of each role: loads the model that the config names, and places it on a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from paddock.config import tree
from paddock.config.distillation import Teacher
from paddock.config.plugins import import_plugin
from paddock.config.roles import ActorRolloutRefConfig
from paddock.config.schema import Config, TrainerConfig
from paddock.config.topology import computes_merged, splits_models
from paddock.core.device import compute_dtype, device_of
from paddock.engines.train.base import Backend, Placement
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import (
    Settings,
    actor_settings,
    critic_settings,
    model_source,
    reference_settings,
)
from paddock.engines.train.single import SingleBackend
from paddock.models.adapters import Lora, attach
from paddock.models.load import load_backbone, load_causal_lm, load_config, load_tokenizer, model_folder, tokenizer_path
from paddock.models.reward_head import load_reward_model
from paddock.models.value_head import ValueModel
from paddock.models.vision import freeze_tower

log = logging.getLogger(__name__)

POLICY = "actor_rollout_ref.model"
_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
Kind = type[Backend]
M = TypeVar("M")


def backend_of(config: Config, alone: bool) -> Kind:
    """Returns the backend that trains: Megatron's if the config says so, else FSDP's unless a process is `alone`."""
    if splits_models(config.actor_rollout_ref.actor):
        assert config.actor_rollout_ref.numerics == "fast"
        if not config.actor_rollout_ref.model.use_remove_padding:
            log.warning("use_remove_padding=False has no effect: Megatron's layers always get packed sequences")
        from paddock.engines.train.megatron.backend import MegatronBackend

        return MegatronBackend
    if alone:
        return SingleBackend
    from paddock.engines.train.fsdp import FSDPBackend

    return FSDPBackend


def placement(config: Config, section: str) -> Placement:
    """Reads where the weights of a role with these keys are placed: the actor's, the reference's or the critic's."""
    keys, group = tree.get(config, section), config.actor_rollout_ref
    lora = {_ACTOR: group.model.lora, "critic": config.critic.model.lora}.get(section)
    fsdp = (keys.model if section == "critic" else keys).fsdp_config
    device = device_of(config.trainer.device)
    return Placement(device, section, keys.ulysses_sequence_parallel_size, fsdp, keys.megatron, lora)


def actor_engine(config: Config, total_steps: int | None = None, backend: Kind = SingleBackend) -> Engine:
    """Makes the actor's engine. `total_steps` are those of the run in which it learns, if its schedule ends with it."""
    group, place = config.actor_rollout_ref, placement(config, _ACTOR)
    settings = actor_settings(group, place.device, total_steps, computes_merged(config))
    lora = Lora.of(group.model, POLICY, config.trainer.seed)
    policy = loaded(load_causal_lm, model_source(group.model, POLICY), settings, place.device, backend, lora)
    attach(policy, lora, settings.wide)
    if group.actor.freeze_vision_tower:
        freeze_tower(policy, settings.compute)
    return Engine(backend.place(policy, settings, place))


def reference_engine(config: Config, backend: Kind = SingleBackend) -> Engine:
    """Loads the frozen model in the type it computes in: weights stored in that type are mapped, not copied."""
    group, place = config.actor_rollout_ref, placement(config, _REF)
    settings = reference_settings(group, place.device)
    model = loaded(load_causal_lm, model_source(group.model, POLICY), settings, place.device, backend, None)
    return Engine(backend.place(model, settings, place))


def rollout_policy(group: ActorRolloutRefConfig, trainer: TrainerConfig) -> Engine:
    """Loads the policy, in the type of rollouts, where an engine apart from the trainer runs it."""
    device = device_of(trainer.device)
    settings = reference_settings(group, device)
    settings = replace(settings, compute=compute_dtype(group.rollout.dtype, device), offload_params=False)
    return frozen_engine(
        load_causal_lm(**model_source(group.model, POLICY), dtype=settings.compute, device=device), settings
    )


def teacher_engine(config: Config, teacher: Teacher, backend: Kind = SingleBackend) -> Engine:
    """Loads a teacher as the reference is loaded. Tokens that the student has not are cut off: they are padding of the
    embedding, for both have one tokenizer (see `check_tokenizers`)."""
    group, place = config.actor_rollout_ref, placement(config, _REF)
    policy = group.model
    settings = reference_settings(group, place.device, config.distillation.distillation_loss.topk)
    trusted = {"trust_remote_code": policy.trust_remote_code}
    source = {"path": teacher.path, "key": teacher.setting, "override_config": {}, **trusted}
    model = loaded(load_causal_lm, source, settings, place.device, backend, None)
    student = load_config(**model_source(policy, POLICY)).get_text_config().vocab_size
    if model.config.get_text_config().vocab_size > student:
        model.resize_token_embeddings(student)
    return Engine(backend.place(model, settings, place))


def critic_engine(config: Config, total_steps: int | None = None, backend: Kind = SingleBackend) -> Engine:
    place, model = placement(config, "critic"), config.critic.model
    if model.external_lib:
        import_plugin(model.external_lib, "critic.model.external_lib")
    shares = config.actor_rollout_ref.actor.use_prefix_grouper
    settings = critic_settings(config.critic, shares, place.device, total_steps)
    lora = Lora.of(model, "critic.model", config.trainer.seed)
    source = model_source(model, "critic.model")
    backbone = loaded(load_backbone, source, settings, place.device, backend, lora)
    critic = ValueModel(attach(backbone, lora, settings.wide))
    critic.load_head(model_folder(str(model.path), "critic.model.path"))
    return Engine(backend.place(critic, settings, place))


def pairs_engine(config: Config, total_steps: int | None = None, backend: Kind = SingleBackend) -> Engine:
    """Makes a reward model to train; a language model gets a head of zeros, which finds all answers equally good."""
    place, model = placement(config, _ACTOR), config.actor_rollout_ref.model
    settings = actor_settings(config.actor_rollout_ref, place.device, total_steps, computes_merged(config))
    lora = Lora.of(model, POLICY, config.trainer.seed)
    source = model_source(model, POLICY) | {"fresh_head": True}
    reward_model = loaded(load_reward_model, source, settings, place.device, backend, lora)
    attach(reward_model.backbone, lora, settings.wide)
    tokenizer = load_tokenizer(tokenizer_path(model, config.data), model.trust_remote_code)
    return Engine(backend.place(reward_model.for_pairs(tokenizer.pad_token_id), settings, place))


def frozen_engine(model: PreTrainedModel | ValueModel, settings: Settings) -> Engine:
    """Makes the engine of a loaded model that this process has whole and does not train."""
    return Engine(SingleBackend(model, settings))


def loaded(
    loader: Callable[..., M], source: dict[str, Any], settings: Settings, device: torch.device, backend: Kind, lora: Any
) -> M:
    """Loads a model; under LoRA its own weights are frozen, in the type in which they compute.

    Ranks read the file as it is, mapped: they share its pages, and each then takes its shard.
    """
    dtype = settings.compute if lora else settings.wide
    if not backend.spans_ranks:
        return loader(**source, dtype=dtype, device=device)
    stored = load_config(**{name: value for name, value in source.items() if name != "fresh_head"}).dtype
    return loader(**source, dtype=stored if isinstance(stored, torch.dtype) else dtype, device="cpu")
