"""One process of a run: makes the roles that live in it, and knows its device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Store

from paddock.config.distillation import teachers_of
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import ANSWERS, PAIRS, rolls_out_beside, trains_adapters
from paddock.core.batch import Batch
from paddock.core.device import device_name, device_of, peak_memory, peak_reserved
from paddock.engines.rollout.base import CopyEngine, RolloutEngine
from paddock.engines.train.base import Backend
from paddock.engines.train.engine import Engine
from paddock.engines.train.open import (
    SingleBackend,
    actor_engine,
    critic_engine,
    pairs_engine,
    reference_engine,
    teacher_engine,
)
from paddock.engines.train.settings import reference_budget
from paddock.rollouts.environments import Environments, RowEnvironments
from paddock.workers.policy import Critic, Policy
from paddock.workers.reward_model import ModelScorer, ModelScores, open_reward_model
from paddock.workers.role import end_tokens
from paddock.workers.rollout import Rollout, RolloutServer
from paddock.workers.supervised import AnswerLearner, Learner, PairLearner
from paddock.workers.weight_sender import WeightSender


class Rank:
    """Holds the roles of one pool that run in this process. `backend` is that of its training engines."""

    def __init__(
        self, config: Config, total_steps: int, names: Sequence[str], backend: type[Backend] = SingleBackend,
        store: Store | None = None,
    ):  # fmt: skip
        """`store`: what the processes of the pool can reach; None: there is no other process."""
        self.config, self.device = config, device_of(config.trainer.device)
        actor_steps = max(1, total_steps - max(0, config.trainer.critic_warmup - 1))  # the actor begins with that step
        self.actor = Policy(actor_engine(config, actor_steps, backend), config) if "actor" in names else None
        self.rollout: Rollout | None = None
        self.critic: Critic | None = None
        self.server: RolloutServer | None = None
        self.sender: WeightSender | None = None
        self.scorer: ModelScorer | None = None
        self.learner: Learner | None = None
        if self.actor and "rollout" in names:
            limits = config.actor_rollout_ref.rollout
            self.rollout = Rollout(rollout_engine(config, self.actor.engine), self.actor, limits, store)
        elif self.actor:
            self.sender = WeightSender(self.actor, config.actor_rollout_ref.rollout, rolls_out_beside(config))
        elif "rollout" in names:
            engine = rollout_engine(config, None)
            assert isinstance(engine, CopyEngine)
            self.server = RolloutServer(engine, self.device, store)
        frozen = [engines for name, engines in FROZEN.items() if name in names]
        self.frozen = {
            name: Policy(engine, config, name) for engines in frozen for name, engine in engines(self, backend).items()
        }
        """Policies that are not trained, by name."""
        if "critic" in names:
            self.critic = Critic(critic_engine(config, total_steps, backend), config.critic)
        if ANSWERS in names:
            self.learner = AnswerLearner(actor_engine(config, total_steps, backend))
        if PAIRS in names:
            self.learner = PairLearner(pairs_engine(config, total_steps, backend))
        for role in (self.actor, *self.frozen.values(), self.critic, self.learner):
            if role:
                role.engine.move("host")  # until it is asked for

    def reference_engines(self, backend: type[Backend]) -> dict[str, Engine]:
        """Makes the reference's engine; under LoRA it is the actor's with its adapters off, in the actor's pool."""
        if not trains_adapters(self.config.actor_rollout_ref):
            return {"reference": reference_engine(self.config, backend)}
        assert self.actor is not None
        return {"reference": self.actor.engine.without_adapters(reference_budget(self.config.actor_rollout_ref.ref))}

    def teacher_engines(self, backend: type[Backend]) -> dict[str, Engine]:
        return {one.role: teacher_engine(self.config, one, backend) for one in teachers_of(self.config.distillation)}

    def role(self, name: str) -> Any:
        """Returns a role that lives here by its name; "": the rank itself."""
        return self.frozen[name] if name in self.frozen else getattr(self, name) if name else self

    def engines(self) -> dict[str, str]:
        """Returns the engine of each role here: a backend's name, or the class that rolls out."""
        roles = {"actor": self.actor, **self.frozen, "critic": self.critic}
        found = {name: role.engine.name for name, role in roles.items() if role}
        rollout = self.rollout or self.server
        return found | ({"rollout": type(rollout.engine).__name__} if rollout else {})

    def device_name(self) -> str:
        return device_name(self.device)

    def memory(self) -> tuple[int, int] | None:
        """Returns the most bytes that tensors took here, and that torch reserved for them; None on a CPU."""
        return None if self.device.type == "cpu" else (peak_memory(self.device), peak_reserved(self.device))

    def end_tokens(self) -> frozenset[int]:
        assert self.actor is not None
        return end_tokens(self.actor.engine)

    def open_scorer(self, tokenizer: Any, stops: frozenset[int]) -> None:
        """Loads the reward model, a whole one in every process; `tokenizer` and `stops` are the policy's."""
        keys = self.config
        self.scorer = open_reward_model(keys.reward_model, keys.data, keys.trainer, tokenizer, stops)

    def open_environments(self, tokenizer: Any, stops: frozenset[int]) -> None:
        """Opens the environments of the run in this process, beside its rollout engine."""
        rollout = self.rollout or self.server
        assert rollout is not None
        rollout.environments = Environments(self.config, tokenizer, stops, RowEnvironments(self.config))

    def score(self, batch: Batch, texts: list[str]) -> ModelScores:
        """Scores this process's share of the rows, which may be none."""
        assert self.scorer is not None
        return self.scorer.scores(batch, texts) if texts else ModelScores(torch.zeros(0))


FROZEN: dict[str, Callable[[Rank, type[Backend]], dict[str, Engine]]] = {
    "reference": Rank.reference_engines,
    "teachers": Rank.teacher_engines,
}
"""What makes the engines of each role that is not trained, by the names of topology.ROLES."""


def rollout_engine(config: Config, trainer: Engine | None) -> RolloutEngine:
    """Makes the rollout engine that the config names. `trainer` has the weights that it samples with; None: they are on
    other devices."""
    module = importlib.import_module(engine_kind(config.actor_rollout_ref.rollout.name).module)
    return module.open_engine(config, trainer)
