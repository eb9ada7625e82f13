"""How good a model is on data files: the validation of a training run, on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddock.commands.frozen_policy import FrozenRollout, open_policy, progress_bar, prompts_at_a_time
from paddock.config.paths import files_of
from paddock.config.schema import Config
from paddock.core.timing import Timer
from paddock.data.dataset import MODEL, PromptDataset
from paddock.data.loader import Loader
from paddock.rewards.manager import RewardManager
from paddock.rollouts.collect import Collector, trial
from paddock.rollouts.environments import Environments, RowEnvironments, in_environments
from paddock.runs.samples import Sample
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
    with RewardManager(config) as rewards:
        policy = open_policy(config)
        dataset = PromptDataset.validation(config.data, policy.tokenizer, policy.reader)
        dataset.scored_by = validation_styles(config.reward_model)
        first = [row for row in dataset.one_of_each_source() if row.style != MODEL]
        several = in_environments(config, dataset)
        template = config.data.apply_chat_template_kwargs.get("chat_template", policy.tokenizer.chat_template)
        rewards.check([trial(row, several, template is not None) for row in first])
        models = open_models(config, policy.tokenizer, policy.stop_tokens)
        loader = Loader(dataset, len(dataset), seed=config.trainer.seed, look_ahead=False)  # nothing is drawn from it
        with progress_bar() as progress, explaining(config, dict):
            task = progress.add_task("evaluating", total=len(dataset))
            environments = (
                Environments(config, policy.tokenizer, policy.stop_tokens, own, rewards.reads_environments)
                if several
                else None
            )
            if environments:
                environments.check(dataset)
            engine = FrozenRollout(policy.engine, lambda count: progress.advance(task, count), environments)
            collector = Collector(config, loader, engine, rewards, policy.tokenizer, policy.stop_tokens, models)
            _, samples = Validation(collector, dataset, policy.stop_tokens).run(0, timer)
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
