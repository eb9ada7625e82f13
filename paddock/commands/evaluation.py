"""How good a model is on data files: the validation of a training run, on its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from paddock.commands.frozen_policy import FrozenRollout, open_policy, progress_bar, prompts_at_a_time
from paddock.config.paths import files_of
from paddock.config.schema import Config
from paddock.core.timing import Timer
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.rewards.manager import RewardManager
from paddock.rollouts.collect import Collector
from paddock.rollouts.environments import RowEnvironments
from paddock.runs.samples import Sample
from paddock.trainer.assembly import open_environments, try_scorers
from paddock.trainer.model_rewards import open_models, validation_styles
from paddock.trainer.out_of_memory import explaining
from paddock.trainer.validation import Validation
from paddock.trainer.validation_metrics import by_source, core_variable, variable_metrics


@dataclass(frozen=True)
class Evaluation:
    model: str
    files: list[str]
    sampling: dict[str, Any]
    sources: dict[str, dict[str, Any]]
    """For each data source: how many prompts, which number of the scorer is meant, and its metrics."""
    mean_length: float
    left_out: int
    seconds: float
    adapter: str | None = None
    """The LoRA adapter on the model, if there is one."""


def evaluate(config: Config) -> Evaluation:
    """val_kwargs.n answers to each prompt of data.val_files, scored as in training."""
    timer, validation = Timer(), config.actor_rollout_ref.rollout.val_kwargs
    config.data.val_batch_size = prompts_at_a_time(config, validation.n)
    own = RowEnvironments(config)
    config = own.prompting()
    with RewardManager(config) as rewards, ExitStack() as things:
        policy = open_policy(config)
        tokenizer, stops = policy.tokenizer, policy.stop_tokens
        styles = validation_styles(config.reward_model)
        dataset = PromptDataset.validation(config.data, tokenizer, policy.reader, styles)
        try_scorers(config, dataset, tokenizer, rewards)
        models = open_models(config, tokenizer, stops)
        loader = Loader(dataset, len(dataset), seed=config.trainer.seed, look_ahead=False)  # nothing is drawn from it
        with progress_bar() as progress, explaining(config, dict):
            task = progress.add_task("evaluating", total=len(dataset))
            hands = rewards.reads_environments
            environments = open_environments(config, dataset, tokenizer, stops, own, things, hands)
            engine = FrozenRollout(policy.engine, lambda count: progress.advance(task, count), environments)
            collector = Collector(config, loader, engine, rewards, tokenizer, stops, models)
            _, samples = Validation(collector, dataset, stops).run(0, timer)
    return Evaluation(
        model=str(config.actor_rollout_ref.model.path),
        files=files_of(config.data.val_files),
        sampling=dict(vars(validation)),
        sources={source: of_source(prompts) for source, prompts in by_source(samples).items()},
        mean_length=sum(sample.length for sample in samples) / len(samples),
        left_out=dataset.left_out,
        seconds=timer.seconds["testing"],
        adapter=config.actor_rollout_ref.model.lora_adapter_path,
    )


def of_source(prompts: list[list[Sample]]) -> dict[str, Any]:
    """`acc` where every scorer returned one, else the reward."""
    variable = core_variable(prompts)
    return {"prompts": len(prompts), "variable": variable, "metrics": variable_metrics(prompts, variable)}
