"""TRL's side of cpu_step.py and of peers.py, run by a Python that has it: the same model, prompts, reward, lengths."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from step_work import Clock, Work, compute_score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [compute_score("", completion[-1]["content"], "") for completion in completions]


def arguments(work: Work) -> GRPOConfig:
    """TRL's own defaults, but for what the work says; Paddock's optimizer settings, and no reference model."""
    return GRPOConfig(
        output_dir=f"{work.folder}/trl",
        max_steps=work.warmup + work.steps,
        per_device_train_batch_size=work.micro_rows,
        gradient_accumulation_steps=work.rows // work.micro_rows,
        num_generations=work.n,
        max_completion_length=work.new_tokens,
        generation_kwargs={"eos_token_id": None},
        bf16=work.weights == "fp32",
        gradient_checkpointing=work.checkpointing,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        shuffle_dataset=False,
        use_cpu=work.device == "cpu",
        dataloader_pin_memory=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


class Steps(TrainerCallback):
    def __init__(self, clock: Clock):
        self.clock = clock

    def on_train_begin(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        self.clock.time(optimizer, "step", "update")
        self.clock.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.clock.end()


def main() -> None:
    work, clock = Work.read(sys.argv[1]), Clock()
    rows = [{"prompt": json.loads(line)["prompt"]} for line in Path(work.data).read_text().splitlines()]
    dtype = torch.bfloat16 if work.weights == "bf16" else torch.float32
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(work.model, padding_side="left"),
        reward_funcs=reward,
        args=arguments(work),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Steps(clock)],
    )
    trainer.eos_token_ids = []  # a response does not end where a token happens to be drawn
    clock.time(trainer, "_generate", "generation")
    clock.time(trainer, "_calculate_rewards", "reward")
    clock.time(trainer, "_compute_loss", "forward")
    clock.time(trainer, "_get_per_token_logps_and_entropies", "forward")
    clock.time(trainer.accelerator, "backward", "update")
    clock.time(trainer.accelerator, "clip_grad_norm_", "update")
    trainer.train()
    if work.device != "cpu":
        clock.memory = torch.cuda.max_memory_allocated()
    tokens = trainer.state.num_input_tokens_seen / (work.warmup + work.steps)
    clock.report(work, tokens, trl=trl.__version__, torch=torch.__version__, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
