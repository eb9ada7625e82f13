#!/usr/bin/env bash
# PPO on GSM8K with gemma-2-2b-it on two GPUs.
#
# hardware: 1 node x 2 a100 (80 GiB each)
# memory:   61 GiB of 80 GiB a device (paddock plan)
# time:     about 84 s a step, 4.9 h for 210 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
# plan:     paddock run --plan run_gemma-2-2b_gsm8k.sh
# run:      bash run_gemma-2-2b_gsm8k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-google/gemma-2-2b-it}
DATA=${DATA:-$HOME/data/gsm8k}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    critic.optim.lr=1e-5 \
    critic.model.path="$MODEL" \
    critic.ppo_max_token_len_per_gpu=16384 \
    trainer.project_name=paddock_ppo \
    trainer.experiment_name=gemma-2-2b_gsm8k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=2 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
