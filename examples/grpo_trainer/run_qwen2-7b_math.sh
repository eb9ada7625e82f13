#!/usr/bin/env bash
# GRPO on GSM8K and MATH together with Qwen2-7B-Instruct: FSDP trains, vLLM writes.
# Every row names its data set, and that picks the scorer; validation reports both.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   59 GiB of 80 GiB a device, 14 GiB of each host (paddock plan)
# time:     about 4.1 min a step, 14 h for 210 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
#           paddock data math  --local_save_dir $HOME/data/math
# plan:     paddock run --plan run_qwen2-7b_math.sh
# run:      bash run_qwen2-7b_math.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
GSM8K=${GSM8K:-$HOME/data/gsm8k}
MATH=${MATH:-$HOME/data/math}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['$GSM8K/train.parquet','$MATH/train.parquet']" \
    data.val_files="['$GSM8K/test.parquet','$MATH/test.parquet']" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=qwen2-7b_math \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
