"""The roles that live in one process, and what is asked of them. A group calls these methods by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from torch import Tensor

from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.engines.rollout.base import Completion, Prompt, RolloutEngine, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.base import Want
from paddock.engines.train.single import SingleEngine
from paddock.errors import UserError
from paddock.workers.worker import CriticWorker, Metrics, PolicyWorker, UpdatePlan


class Crew:
    """`roles` of one pool, on this process's device; `engines` is how it trains: alone, or with other ranks."""

    def __init__(
        self, config: Config, total_steps: int, roles: Sequence[str], engines: type[SingleEngine] = SingleEngine
    ):
        self.workers: dict[str, PolicyWorker | CriticWorker] = {}
        self.rollout: RolloutEngine | None = None
        self.awake = ExitStack()
        if "actor" in roles:
            self.workers["actor"] = PolicyWorker(engines.for_actor(config, total_steps), config)
            self.rollout = rollout_engine(config, self.actor_engine)
        if "reference" in roles:
            self.workers["reference"] = PolicyWorker(engines.for_reference(config), config)
        if "critic" in roles:
            self.workers["critic"] = CriticWorker(engines.for_critic(config, total_steps), config)

    @property
    def actor_engine(self) -> SingleEngine:
        engine = self.workers["actor"].engine
        assert isinstance(engine, SingleEngine)
        return engine

    def engines(self) -> dict[str, str]:
        """What runs each role here, by the names that a plan uses."""
        found = {role: type(worker.engine).__name__ for role, worker in self.workers.items()}
        return found | ({"rollout": type(self.rollout).__name__} if self.rollout else {})

    def end_tokens(self) -> frozenset[int]:
        return end_tokens(self.actor_engine)

    def move(self, role: str, where: Literal["device", "host"]) -> None:
        self.workers[role].engine.move(where)

    def forward(self, batch: Batch, role: str, want: Want) -> dict[str, Tensor]:
        """The wanted columns, and the ids of their rows."""
        outputs = self.workers[role].forward(batch, want)
        return {"row": batch.row, **{name: getattr(outputs, name) for name in want}}

    def update(self, batch: Batch, plan: UpdatePlan, role: str) -> Metrics:
        return self.workers[role].carry_out(batch, plan)

    def wake(self) -> None:
        """All weights come together for a rollout."""
        self.actor_engine.move("device")
        self.awake.callback(self.actor_engine.move, "host")
        self.awake.enter_context(self.actor_engine.gathered())

    def sleep(self) -> None:
        assert self.rollout is not None
        self.rollout.sleep()
        self.awake.close()

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
        assert self.rollout is not None
        return self.rollout.generate(prompts, sampling) if prompts else []

    def sync_weights(self) -> None:
        """The rollout engine takes the actor's new weights; one that runs the actor's own has them."""
        assert self.rollout is not None
        self.rollout.load_weights(self.actor_engine.weights())

    def save(self, role: str, path: Path) -> None:
        if not path.is_dir():
            raise UserError(
                f"the process of the {role} does not see {path}",
                key="trainer.default_local_dir",
                fix="a folder that all nodes share",
            )
        self.workers[role].save(path)

    def load(self, role: str, path: Path) -> None:
        self.workers[role].load(path)


def end_tokens(engine: SingleEngine) -> frozenset[int]:
    """Those that the model's own generation config names: an end of turn, say."""
    named = getattr(engine.rollout_model.generation_config, "eos_token_id", None)
    return frozenset(token for token in (named if isinstance(named, list) else [named]) if token is not None)


def rollout_engine(config: Config, engine: SingleEngine) -> RolloutEngine:
    rollout = config.actor_rollout_ref.rollout
    assert rollout.max_num_seqs is not None
    if rollout.name == "embedded":
        return EmbeddedEngine(
            engine.rollout_model,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.max_model_len,
            enforce_eager=rollout.enforce_eager,
        )
    if rollout.name == "hf":
        return HFEngine(engine.rollout_model, max_num_seqs=rollout.max_num_seqs)
    raise UserError(
        "is not built yet",
        key="actor_rollout_ref.rollout.name",
        value=rollout.name,
        fix="actor_rollout_ref.rollout.name=embedded",
    )
