"""TRL's side of against_trl.py: its GRPOTrainer trains what the keys of a `paddock train` command describe.

Prompts, their order and their reward are Paddock's own, the trainer and its generation are TRL's. A line per step is
written to metrics.jsonl, under the names that `paddock train` gives to the same numbers; the model is saved at the end.

What stays different: TRL divides by std + 1e-4 where Paddock divides by std + 1e-6, its weight decay leaves norms and
biases alone, and it computes in bf16 by autocast over fp32 weights, where Paddock keeps a bf16 copy beside them.
cuDNN's attention is switched off: its backward returns NaN for some lengths, which ended a run at its seventh step
(https://github.com/pytorch/pytorch/issues/196678).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.results.against_trl import MODEL
from benchmarks.step_work import Clock
from paddock.config.schema import Config
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.loader import Loader
from paddock.loading.load import load
from paddock.models.load import model_folder, open_tokenizer
from paddock.rewards.rules import compute_score

METRICS = {
    "reward": "critic/score/mean",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
}
"""TRL's name of a number and Paddock's. `clipped_ratio` is the share of answers without an end; Paddock's share also
counts answers of the longest length that end with their last token."""


def require_same_work(config: Config) -> None:
    """Refuses an experiment that TRL would train in another way, and names the first key that differs."""
    data, algorithm, group = config.data, config.algorithm, config.actor_rollout_ref
    actor = group.actor
    same = {
        "algorithm.adv_estimator": (algorithm.adv_estimator, "grpo"),
        "algorithm.norm_adv_by_std_in_grpo": (algorithm.norm_adv_by_std_in_grpo, True),
        "algorithm.use_kl_in_reward": (algorithm.use_kl_in_reward, False),
        "algorithm.filter_groups.enable": (algorithm.filter_groups.enable, False),
        "actor_rollout_ref.actor.use_kl_loss": (actor.use_kl_loss, False),
        "actor_rollout_ref.actor.entropy_coeff": (actor.entropy_coeff, 0.0),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (actor.policy_loss.loss_mode, "vanilla"),
        "actor_rollout_ref.actor.loss_agg_mode": (actor.loss_agg_mode or "token-mean", "token-mean"),
        "actor_rollout_ref.actor.ppo_epochs": (actor.ppo_epochs, 1),
        "actor_rollout_ref.actor.ppo_mini_batch_size": (actor.ppo_mini_batch_size, data.train_batch_size),
        "actor_rollout_ref.actor.optim.lr_scheduler_type": (actor.optim.lr_scheduler_type, "constant"),
        "actor_rollout_ref.rollout.multi_turn.enable": (group.rollout.multi_turn.enable, False),
        "custom_reward_function.path": (config.custom_reward_function.path, None),
    }
    for key, (value, expected) in same.items():
        if value != expected:
            raise SystemExit(f"{key}={value}: the comparison with TRL needs {expected}; choose grpo-0.5b or grpo-135m")


def prompts(config: Config) -> list[PromptRow]:
    """Returns the prompts of all steps, in the order in which `paddock train` draws them with this seed."""
    tokenizer = open_tokenizer(config.actor_rollout_ref.model, config.data)
    loader = Loader.train(config.data, PromptDataset.train(config.data, tokenizer))
    steps = range(config.trainer.total_training_steps or 0)
    return list(itertools.chain.from_iterable(loader.next_prompts() for _ in steps))


def dataset(rows: Sequence[PromptRow]) -> Dataset:
    """Returns TRL's rows: messages, to which TRL applies the chat template itself, or plain texts, and what the reward
    reads."""
    return Dataset.from_list(
        [{"prompt": row.messages, "data_source": row.data_source, "ground_truth": row.ground_truth} for row in rows]
    )


def reward(completions: list[Any], data_source: list[str], ground_truth: list[Any], **columns: Any) -> list[float]:
    """Scores each answer by the rule that Paddock has for its source."""
    answers = (found if isinstance(found, str) else found[-1]["content"] for found in completions)
    return [float(compute_score(*row)) for row in zip(data_source, answers, ground_truth, strict=True)]


def arguments(config: Config, micro_batch: int, weights: str) -> GRPOConfig:
    """Returns TRL's settings of the same work. `weights`: float32, TRL's own default, or bfloat16.

    A step is one generation of all answers and one optimizer step, in micro-batches of `micro_batch` answers. The loss
    `dapo` is the mean over all tokens of the step, which Paddock calls token-mean. Answers come from transformers'
    `generate`, TRL's default.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    answers = config.data.train_batch_size * rollout.n
    if answers % micro_batch:
        raise SystemExit(f"--micro-batch {micro_batch}: {answers} answers of a step are no multiple of it")
    return GRPOConfig(
        output_dir=config.trainer.default_local_dir,
        max_steps=config.trainer.total_training_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=answers // micro_batch,
        num_generations=rollout.n,
        max_completion_length=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=max(0, rollout.top_k),
        min_p=rollout.min_p or None,
        learning_rate=actor.optim.lr,
        lr_scheduler_type=actor.optim.lr_scheduler_type,
        weight_decay=actor.optim.weight_decay,
        adam_beta1=actor.optim.betas[0],
        adam_beta2=actor.optim.betas[1],
        max_grad_norm=actor.optim.clip_grad,
        beta=0.0,
        epsilon=actor.clip_ratio,
        loss_type="dapo",
        scale_rewards="group",
        model_init_kwargs={"dtype": weights},
        bf16=weights == "float32" and actor.fsdp_config.dtype in ("bfloat16", "bf16"),
        gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        shuffle_dataset=False,
        seed=config.trainer.seed,
        use_cpu=config.trainer.device == "cpu",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


class Recorder(TrainerCallback):
    """Writes a line per step to `file`, and ends training after the step that passes `seconds`.

    A step lasts from the end of the one before it to its own end, on the device too.
    """

    def __init__(self, file: Path, seconds: float):
        self.file, self.seconds, self.clock = file, seconds, Clock()
        file.write_text("")

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.monotonic()
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.clock.end()
        if time.monotonic() - self.began > self.seconds:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """TRL logs a step after its end, and at the end of training some totals, which have no reward."""
        if "reward" not in logs:
            return
        wall = {phase: seconds for phase, (seconds, _) in self.clock.steps[-1].items()}
        line = {
            "step": state.global_step,
            **{name: logs[own] for own, name in METRICS.items() if own in logs},
            "timing_s/step": sum(wall.values()),
            "timing_s/gen": wall["generation"],
            "timing_s/update_actor": wall["other"],
        }
        if torch.cuda.is_available():
            line["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def open_trainer(config: Config, rows: Sequence[PromptRow], settings: GRPOConfig, recorder: Recorder) -> GRPOTrainer:
    """Returns TRL's trainer, if it makes the same tokens of the first prompts as Paddock does."""
    trainer = GRPOTrainer(
        model=str(model_folder(str(config.actor_rollout_ref.model.path))),
        reward_funcs=reward,
        args=settings,
        train_dataset=dataset(rows),
        callbacks=[recorder],
    )
    first = rows[: config.data.train_batch_size]
    tokens, *_ = trainer._tokenize_prompts([row.messages for row in first])
    if tokens != [row.tokens for row in first]:
        raise SystemExit("TRL makes other tokens of the prompts of the first step than Paddock does")
    recorder.clock.time(trainer, "_generate", "generation")
    recorder.clock.time(trainer, "_calculate_rewards", "reward")
    return trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="keys of `paddock train`")
    options = parser.parse_args()
    config = load(options.settings).config
    require_same_work(config)
    folder = Path(config.trainer.default_local_dir)
    recorder = Recorder(folder / "metrics.jsonl", options.seconds)
    trainer = open_trainer(config, prompts(config), arguments(config, options.micro_batch, options.weights), recorder)
    torch.backends.cuda.enable_cudnn_sdp(False)
    trainer.train()
    trainer.save_model(str(folder / MODEL))
    return 0


if __name__ == "__main__":
    sys.exit(main())
