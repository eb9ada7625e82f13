"""Paddock's side of cpu_step.py: a run as `paddock train` makes it, with a clock on methods of trainer and roles."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import step_work
import torch
import transformers
from step_work import Clock, Work

import paddock
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.rollouts.collect import Collector
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import train
from paddock.workers.policy import Policy


def arguments(work: Work) -> list[str]:
    group = "actor_rollout_ref"
    return [
        "algorithm.adv_estimator=grpo",
        f"{group}.model.path={work.model}",
        f"{group}.model.enable_gradient_checkpointing={work.checkpointing}",
        f"{group}.rollout.n={work.n}",
        f"{group}.rollout.ignore_eos=True",
        f"{group}.actor.fsdp_config.model_dtype={work.weights}",
        f"data.train_files={work.data}",
        "data.val_files=[]",
        f"data.train_batch_size={work.prompts}",
        f"data.max_prompt_length={work.prompt_tokens}",
        f"data.max_response_length={work.new_tokens}",
        "data.shuffle=False",
        f"custom_reward_function.path={step_work.__file__}",
        "trainer.device=cpu",
        f"trainer.total_training_steps={work.warmup + work.steps}",
        *("trainer.logger=[file]", "trainer.save_last=False"),
        f"trainer.default_local_dir={work.folder}/paddock",
        *work.settings,
    ]


def main() -> None:
    work, clock = Work.read(sys.argv[1]), Clock()
    clock.time(Collector, "drawn_by", "generation")
    clock.time(Collector, "score_drawn", "reward")
    clock.time(SingleBackend, "outputs", "forward")
    clock.time(Policy, "learn", "update")
    advance = Trainer.advance

    def timed_advance(*args: object, **kwargs: object) -> None:
        clock.start()
        advance(*args, **kwargs)  # type: ignore[arg-type]
        clock.end()

    Trainer.advance = timed_advance  # type: ignore[assignment,method-assign]
    train(load(arguments(work)).config)
    metrics = [json.loads(line) for line in Path(work.folder, "paddock", "metrics.jsonl").read_text().splitlines()]
    tokens = work.rows * statistics.mean(step["prompt_length/mean"] + step["response_length/mean"] for step in metrics)
    versions = {"paddock": paddock.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    clock.report(work, tokens, **versions)


if __name__ == "__main__":
    main()
