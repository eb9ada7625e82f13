#!/usr/bin/env bash
# GRPO on Geometry3K with Qwen2.5-VL-7B-Instruct and LoRA on the language model; the image tower gets no adapter.
#
# hardware: 1 node x 2 a100 (80 GiB each)
# memory:   71 GiB of 80 GiB a device (paddock plan)
# time:     about 15 min a step, 30 h for 120 steps (paddock plan, every response of full length)
# data:     paddock data geo3k --local_save_dir $HOME/data/geo3k
# plan:     paddock run --plan run_qwen2.5-vl-7b_vl_lora_geo3k.sh
# run:      bash run_qwen2.5-vl-7b_vl_lora_geo3k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}
DATA=${DATA:-$HOME/data/geo3k}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.image_key=images \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.model.exclude_modules='.*visual.*' \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=qwen2.5-vl-7b_vl_lora_geo3k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=2 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
