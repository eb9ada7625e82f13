"""A config becomes a run: data, rewards, roles and loggers are put together, and the newest checkpoint is found."""

from __future__ import annotations

import importlib
import logging
from contextlib import ExitStack

from paddock.config.schema import Config
from paddock.core.device import seed_all
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.models.load import load_tokenizer
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import ScoreRequest
from paddock.trainer.checkpoint import checkpoint_store, resume_point
from paddock.trainer.experience import Experience
from paddock.trainer.loop import Trainer
from paddock.trainer.tracking import Tracker
from paddock.trainer.validation import Validation
from paddock.workers.roles import build

log = logging.getLogger(__name__)


def train(config: Config) -> bool:
    """True when all steps are done; False when it was interrupted and a checkpoint waits."""
    model = config.actor_rollout_ref.model
    if model.external_lib:
        importlib.import_module(model.external_lib)
    seed_all(config.trainer.seed)
    with ExitStack() as open_things:
        tokenizer = load_tokenizer(
            config.data.tokenizer or model.tokenizer_path or model.path or "",
            model.trust_remote_code,
            model.custom_chat_template,
        )
        dataset = PromptDataset.train(config.data, tokenizer)
        loader = Loader.train(config.data, dataset)
        rewards = open_things.enter_context(RewardManager(config))
        rewards.check([ScoreRequest(row.data_source, "", row.ground_truth, row.extra_info, row.place)
                       for row in dataset.one_of_each_source()])  # fmt: skip
        total_steps = config.trainer.total_training_steps or loader.steps_per_epoch * config.trainer.total_epochs
        roles = build(config, tokenizer, total_steps)
        experience = Experience(config, loader, roles.rollout, rewards, tokenizer, roles.stop_tokens)
        validation = None
        if config.data.val_files:
            validation = Validation(experience, PromptDataset.validation(config.data, tokenizer), roles.stop_tokens)
        store = checkpoint_store(config)
        trainer = Trainer(config, roles, experience, validation, store, total_steps)
        checkpoint = resume_point(config.trainer, store)
        loggers = trainer.restore(checkpoint) if checkpoint else None
        tracker = open_things.enter_context(
            Tracker(config, total_steps, checkpoint.step if checkpoint else None, loggers)
        )
        return trainer.fit(tracker)
