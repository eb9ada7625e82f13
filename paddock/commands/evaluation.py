"""How good a model is on data files: the validation of a training run, on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddock.commands.frozen_policy import open_policy, prompts_at_a_time
from paddock.config.paths import files_of
from paddock.core.timing import Timer
from paddock.data.loader import Loader
from paddock.rollouts.collect import Collector
from paddock.trainer.assembly import Assembly
from paddock.trainer.out_of_memory import explaining
from paddock.trainer.validation import Validation, by_source, core_variable, variable_metrics


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


def evaluate(parts: Assembly) -> Evaluation:
    """Scores val_kwargs.n answers to each prompt of data.val_files as training would."""
    config, timer = parts.config, Timer()
    validation = config.actor_rollout_ref.rollout.val_kwargs
    config.data.val_batch_size = prompts_at_a_time(config.data, validation.n)
    rewards = parts.rewards()
    policy = open_policy(parts)
    dataset = parts.held_out()
    parts.try_scorers(dataset, rewards)
    models = parts.models(policy.stop_tokens)
    loader = Loader(dataset, len(dataset), seed=config.trainer.seed, look_ahead=False)  # nothing is drawn from it
    with explaining(config, dict):
        rollout = policy.over(parts, dataset, "evaluating", rewards.reads_environments)
        collector = Collector(config, loader, rollout, rewards, parts.tokenizer, policy.stop_tokens, models)
        _, samples = Validation(collector, dataset).run(0, timer)
    sources = {}
    for source, prompts in by_source(samples).items():
        variable = core_variable(prompts)
        metrics = variable_metrics(prompts, variable)
        sources[source] = {"prompts": len(prompts), "variable": variable, "metrics": metrics}
    return Evaluation(
        model=str(config.actor_rollout_ref.model.path),
        files=files_of(config.data.val_files),
        sampling=dict(vars(validation)),
        sources=sources,
        mean_length=sum(sample.length for sample in samples) / len(samples),
        left_out=dataset.left_out,
        seconds=timer.seconds["testing"],
        adapter=config.actor_rollout_ref.model.lora_adapter_path,
    )
