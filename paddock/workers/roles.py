"""Who takes part in a run, by its config: actor and rollout always, reference and critic where they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddock.config.schema import Config
from paddock.config.topology import needs_reference, world_size
from paddock.engines.rollout.base import RolloutEngine
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.single import SingleEngine
from paddock.errors import UserError
from paddock.workers.worker import CriticWorker, PolicyWorker


@dataclass(frozen=True)
class Roles:
    actor: PolicyWorker
    rollout: RolloutEngine
    reference: PolicyWorker | None
    critic: CriticWorker | None
    stop_tokens: frozenset[int]


def build(config: Config, tokenizer: Any, total_steps: int) -> Roles:
    """Every role in this process, on one device."""
    if world_size(config) > 1:
        raise UserError(
            "this version trains on one device",
            key="trainer.n_gpus_per_node",
            value=config.trainer.n_gpus_per_node,
            fix="trainer.n_gpus_per_node=1 trainer.nnodes=1",
        )
    engine = SingleEngine.for_actor(config, total_steps)
    return Roles(
        actor=PolicyWorker(engine, config),
        rollout=rollout_engine(config, engine),
        reference=PolicyWorker(SingleEngine.for_reference(config), config) if needs_reference(config) else None,
        critic=CriticWorker(SingleEngine.for_critic(config, total_steps), config) if config.critic.enable else None,
        stop_tokens=stop_tokens(engine, tokenizer),
    )


def rollout_engine(config: Config, engine: SingleEngine) -> RolloutEngine:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "embedded":
        return EmbeddedEngine(
            engine.model,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.max_model_len,
        )
    if rollout.name == "hf":
        return HFEngine(engine.model, max_num_seqs=rollout.max_num_seqs)
    raise UserError(
        "is not built yet",
        key="actor_rollout_ref.rollout.name",
        value=rollout.name,
        fix="actor_rollout_ref.rollout.name=embedded",
    )


def stop_tokens(engine: SingleEngine, tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end of text, and those that the model's generation config names (an end of turn, say)."""
    named = getattr(engine.model.generation_config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return frozenset(token for token in ids if token is not None)
