"""Reinforcement learning as a config describes it: data, rewards and roles are put together."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from pathlib import Path

from paddock.config.schema import Config
from paddock.config.topology import estimator_needs, learns_from_rewards, pools
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.errors import UserError
from paddock.rewards.manager import NO_FUNCTIONS, Functions
from paddock.rollouts.collect import Collector
from paddock.trainer.assembly import Assembly
from paddock.trainer.lifecycle import RunFolder
from paddock.trainer.loop import Trainer
from paddock.trainer.model_rewards import training_styles
from paddock.trainer.run import RunKind
from paddock.trainer.validation import Validation
from paddock.workers.roles import build
from paddock.workers.teachers import check_routes, check_tokenizers

log = logging.getLogger(__name__)


def open_trainer(config: Config, folder: RunFolder, things: ExitStack, functions: Functions = NO_FUNCTIONS) -> Trainer:
    """Puts data, rewards and roles together; what is to be closed with the trainer goes on the stack."""
    parts = Assembly(config, things, functions)
    config, tokenizer = parts.config, parts.tokenizer
    check_tokenizers(config.distillation, tokenizer, config.actor_rollout_ref.model.trust_remote_code)
    log.info("reading %s", config.data.train_files)
    dataset = PromptDataset.train(config.data, tokenizer, parts.reader, training_styles(config.reward_model))
    check_routes(config.distillation, config.data.reward_fn_key, dataset.sources)
    loader = Loader.train(config.data, dataset)
    rewards = parts.rewards(Path(config.trainer.default_local_dir))
    total_steps = rewards.total_steps = config.trainer.steps(loader.steps_per_epoch)
    tries = parts.try_scorers(dataset, rewards)
    paid = config.reward_model.enable or rewards.pays(tries) or any(one.may_pay for one in parts.rows.without_agent())
    if config.environment and learns_from_rewards(config) and not paid:
        raise UserError(
            "nothing pays: it has neither `step` nor `reward` (a plain class: `get_reward`), and no function scores",
            key="environment", value=config.environment,
            fix="return paddock.Turn(reward=...) from `step`, or name a rule or function: reward=, "
            "custom_reward_function.path=FILE.py:FUNCTION",
        )  # fmt: skip
    log.info("loading the weights of %s", config.actor_rollout_ref.model.path)
    roles = things.enter_context(closing(build(config, tokenizer, config.trainer.total_training_steps or total_steps)))
    models = parts.models(roles.stop_tokens, roles.scoring)
    if models:
        models.check(dataset)
    environments = parts.environments(roles.stop_tokens, dataset, rewards.reads_environments)
    if environments:
        roles.rollout.open_environments(environments)
    greedy = "greedy_baseline" in estimator_needs(config)
    collector = Collector(
        config, loader, roles.rollout, rewards, tokenizer, roles.stop_tokens, models, greedy, total_steps
    )
    validation = None
    if config.data.val_files:
        held_out = parts.held_out()
        if environments and parts.rows.routed:
            environments.check(held_out)
        validation = Validation(collector, held_out)
    return Trainer(parts, roles, collector, validation, folder, total_steps)


REINFORCEMENT = RunKind("train", pools, open_trainer)
train = REINFORCEMENT.train
