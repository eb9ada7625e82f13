"""The catalogue of rollout engines: what each needs and can do. Code asks for an ability, never for a name."""

from __future__ import annotations

from dataclasses import dataclass

from paddock.errors import UserError


@dataclass(frozen=True)
class RolloutEngineKind:
    """What a rollout engine declares about itself."""

    module: str
    """Module with `open_engine(config, trainer)`, which makes one."""
    package: str | None = None
    """Package that must be installed."""
    copies_weights: bool = False
    """Has a copy of the actor's weights: it is sent new ones, may span devices and may run in a pool of its own."""
    sees_images: bool = False
    trainer_log_probs: bool = False
    """The same modules compute the engine's log-probs and the trainer's: both are equal."""
    unfiltered_log_probs: bool = True
    """Reports log-probs after temperature and before top-k, top-p and min-p cut the distribution."""
    merges_adapters: bool = False
    """Can add adapters to the actor's own weights for a rollout. An engine that copies weights is sent merged ones."""
    priorities: bool = False
    """Can serve requests by priority."""
    stop_strings: bool = False
    """Can end a response with the token that completes a stop string."""
    min_tokens: bool = False
    """Can keep a response from ending before so many tokens, with log-probs of the whole distribution."""
    serves_apart: bool = False
    """Can have weights of its own, in a pool apart from the trainer, although it runs the trainer's where it can."""
    keeps_parts: bool = False
    """Returns what it drew of a response that a pause interrupts."""
    splits_experts: bool = False
    """Can place the experts of a layer on several devices; of interest only for an engine that copies weights."""


ENGINES: dict[str, RolloutEngineKind] = {
    "embedded": RolloutEngineKind(
        "paddock.engines.rollout.embedded.open",
        sees_images=True,
        trainer_log_probs=True,
        serves_apart=True,
        merges_adapters=True,
        stop_strings=True,
        min_tokens=True,
        keeps_parts=True,
    ),
    "hf": RolloutEngineKind("paddock.engines.rollout.hf", sees_images=True, stop_strings=True, min_tokens=True),
    "vllm": RolloutEngineKind(
        "paddock.engines.rollout.vllm",
        package="vllm",
        copies_weights=True,
        unfiltered_log_probs=False,
        priorities=True,
        stop_strings=True,
        min_tokens=True,
        keeps_parts=True,
    ),
    "sglang": RolloutEngineKind(
        "paddock.engines.rollout.sglang",
        package="sglang",
        copies_weights=True,
        splits_experts=True,
        stop_strings=True,
    ),
}


def engine_kind(name: str | None) -> RolloutEngineKind:
    """Returns what the engine of this name declares; raises UserError for a name that the catalogue has not."""
    if name not in ENGINES:
        key = "actor_rollout_ref.rollout.name"
        raise UserError("is not one of the values it takes", key=key, value=name, fix=f"one of: {', '.join(ENGINES)}")
    return ENGINES[name]
