"""Reinforcement learning as a config describes it: data, rewards and roles are put together."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from pathlib import Path

from paddock.config.schema import Config
from paddock.config.topology import learns_from_rewards, pools
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.errors import UserError
from paddock.models.image_reader import ImageReader
from paddock.models.load import open_tokenizer
from paddock.rewards.manager import NO_FUNCTIONS, Functions, RewardManager
from paddock.rollouts.collect import Collector
from paddock.rollouts.environments import RowEnvironments
from paddock.runs.checkpoint import CheckpointStore
from paddock.runs.lock import FolderLock
from paddock.trainer.assembly import open_environments, try_scorers
from paddock.trainer.loop import Trainer
from paddock.trainer.model_rewards import open_models, training_styles, validation_styles
from paddock.trainer.run import RunKind
from paddock.trainer.validation import Validation
from paddock.workers.roles import build
from paddock.workers.teachers import check_routes, check_tokenizers

log = logging.getLogger(__name__)


def open_trainer(
    config: Config, store: CheckpointStore, lock: FolderLock, things: ExitStack, functions: Functions = NO_FUNCTIONS
) -> Trainer:
    """Puts data, rewards and roles together; what is to be closed with the trainer goes on the stack.

    `functions`: rewards, tools and environments that the config names as `python:NAME`.
    """
    rows = RowEnvironments(config, functions)
    config = rows.prompting()
    tokenizer = open_tokenizer(config.actor_rollout_ref.model, config.data)
    check_tokenizers(config.distillation, tokenizer, config.actor_rollout_ref.model.trust_remote_code)
    reader = ImageReader.of(config.actor_rollout_ref, config.data)
    log.info("reading %s", config.data.train_files)
    dataset = PromptDataset.train(config.data, tokenizer, reader, training_styles(config.reward_model))
    check_routes(config.distillation, config.data.reward_fn_key, dataset.sources)
    loader = Loader.train(config.data, dataset)
    rewards = things.enter_context(RewardManager(config, functions, Path(config.trainer.default_local_dir)))
    total_steps = config.trainer.steps(loader.steps_per_epoch)
    rewards.total_steps = total_steps
    tries = try_scorers(config, dataset, tokenizer, rewards)
    paid = config.reward_model.enable or rewards.pays(tries) or any(one.may_pay for one in rows.without_agent())
    if config.environment and learns_from_rewards(config) and not paid:
        raise UserError(
            "nothing pays: it has neither `step` nor `reward` (a plain class: `get_reward`), and no function scores",
            key="environment", value=config.environment,
            fix="return paddock.Turn(reward=...) from `step`, or name a rule or function: reward=, "
            "custom_reward_function.path=FILE.py:FUNCTION",
        )  # fmt: skip
    log.info("loading the weights of %s", config.actor_rollout_ref.model.path)
    roles = things.enter_context(closing(build(config, tokenizer, config.trainer.total_training_steps or total_steps)))
    models = open_models(config, tokenizer, roles.stop_tokens, roles.scoring)
    if models:
        models.check(dataset)
    stops, hands = roles.stop_tokens, rewards.reads_environments
    environments = open_environments(config, dataset, tokenizer, stops, rows, things, hands)
    if environments:
        roles.rollout.open_environments(environments)
    collector = Collector(config, loader, roles.rollout, rewards, tokenizer, stops, models)
    validation = None
    if config.data.val_files:
        held_out = PromptDataset.validation(config.data, tokenizer, reader, validation_styles(config.reward_model))
        if environments and rows.routed:
            environments.check(held_out)
        validation = Validation(collector, held_out, stops)
    return Trainer(config, roles, collector, validation, store, lock, total_steps)


REINFORCEMENT = RunKind("train", pools, open_trainer)
train = REINFORCEMENT.train
