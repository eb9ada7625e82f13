"""A model that only answers: frozen, in the type the rollout engine computes in, and no other role beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paddock.config.schema import DataConfig
from paddock.config.topology import world_size
from paddock.core.device import compute_dtype, device_of
from paddock.data.dataset import PromptDataset
from paddock.engines.rollout.base import RolloutEngine, Sampling, Until
from paddock.engines.train.open import frozen_engine
from paddock.engines.train.settings import Settings, model_source
from paddock.errors import UserError
from paddock.loading import rules
from paddock.models.adapters import Lora, attach
from paddock.models.load import load_causal_lm
from paddock.rollouts.conversations import OnEpisodes
from paddock.rollouts.environments import Environments, Sampler, roll_out
from paddock.rollouts.episode import Episode
from paddock.trainer.assembly import Assembly
from paddock.workers.probe import sync
from paddock.workers.rank import rollout_engine
from paddock.workers.role import stop_tokens

RESPONSES_AT_A_TIME = 512
"""Responses between two moves of a progress bar, unless data.val_batch_size is set."""


@dataclass(frozen=True)
class FrozenRollout(Sampler):
    """Samples from a model that is not trained, and calls `answered` with the number of prompts of each call."""

    engine: RolloutEngine
    stop_tokens: frozenset[int]
    environments: Environments | None = None
    answered: Callable[[int], None] = lambda count: None

    @property
    def version(self) -> int:
        return 0

    def go_on(
        self,
        asked: list[Episode],
        sampling: Sampling,
        on_done: OnEpisodes | None = None,
        until: Until | None = None,
    ) -> list[Episode]:
        episodes = roll_out(self.engine, self.version, asked, sampling, on_done, self.environments)
        self.answered(len({episode.group for episode in asked}))
        return episodes

    def over(self, parts: Assembly, dataset: PromptDataset, title: str, hands: bool = False) -> FrozenRollout:
        """Returns a rollout that answers the rows in their environments and moves a progress bar. It shows on a
        terminal and on stderr: what a command prints stays clean. `hands`: see `Environments`."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("ETA"), TimeRemainingColumn())  # fmt: skip
        screen = Console(stderr=True)
        bar = Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True)
        task = parts.things.enter_context(bar).add_task(title, total=len(dataset))
        environments = parts.environments(self.stop_tokens, dataset, hands)
        return replace(self, environments=environments, answered=lambda count: bar.advance(task, count))


def open_policy(parts: Assembly) -> FrozenRollout:
    """Loads the policy of a config, to be sampled from on one device."""
    config = parts.config
    if world_size(config) > 1:
        raise UserError(
            "this command runs on one device",
            key="trainer.n_gpus_per_node",
            value=config.trainer.n_gpus_per_node,
            fix="trainer.n_gpus_per_node=1 trainer.nnodes=1",
        )
    rules.require(config, rules.Scope.ALONE)
    model, dtype = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.dtype
    device = device_of(config.trainer.device)
    weights = load_causal_lm(
        **model_source(model, "actor_rollout_ref.model"), dtype=compute_dtype(dtype, device), device=device
    )
    attach(weights, Lora.of(model, "actor_rollout_ref.model", config.trainer.seed), weights.dtype)
    engine = frozen_engine(weights, Settings())
    rollout = rollout_engine(config, engine)
    sync(engine, rollout, config.actor_rollout_ref.rollout)
    return FrozenRollout(rollout, stop_tokens(engine, parts.tokenizer))


def prompts_at_a_time(data: DataConfig, samples: int) -> int:
    return data.val_batch_size or max(1, RESPONSES_AT_A_TIME // samples)
