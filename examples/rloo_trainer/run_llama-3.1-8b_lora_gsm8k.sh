#!/usr/bin/env bash
# RLOO on GSM8K with Llama-3.1-8B-Instruct and LoRA on one GPU.
#
# hardware: 1 node x 1 h100 (80 GiB each)
# memory:   72 GiB of 80 GiB a device (paddock plan)
# time:     about 2.4 min a step, 6.8 h for 174 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
# plan:     paddock run --plan run_llama-3.1-8b_lora_gsm8k.sh
# run:      bash run_llama-3.1-8b_lora_gsm8k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.actor.optim.lr=3e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.project_name=paddock_rloo \
    trainer.experiment_name=llama-3.1-8b_lora_gsm8k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=3 \
    "$@"
