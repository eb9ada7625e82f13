#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-3B-Instruct and LoRA on one consumer GPU: only the adapters have gradients and
# moments, the reference is the model with its adapters off, and the rollout runs the same weights.
#
# hardware: 1 node x 1 4090 (24 GiB each)
# memory:   22 GiB of 24 GiB a device (paddock plan)
# time:     about 3.0 min a step, 12 h for 232 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
# plan:     paddock run --plan run_qwen2.5-3b_lora_gsm8k.sh
# run:      bash run_qwen2.5-3b_lora_gsm8k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.actor.optim.lr=3e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=qwen2.5-3b_lora_gsm8k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=2 \
    "$@"
