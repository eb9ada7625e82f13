#!/usr/bin/env bash
# PPO on GSM8K and MATH with Qwen2-7B-Instruct, prompts and answers of up to 4096 tokens: token budgets for actor and
# critic, rows balanced over the GPUs.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   61 GiB of 80 GiB a device (paddock plan)
# time:     about 6.5 min a step, 23 h for 210 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
#           paddock data math  --local_save_dir $HOME/data/math
# plan:     paddock run --plan run_qwen2-7b_seq_balance_math.sh
# run:      bash run_qwen2-7b_seq_balance_math.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
GSM8K=${GSM8K:-$HOME/data/gsm8k}
MATH=${MATH:-$HOME/data/math}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="['$GSM8K/train.parquet','$MATH/train.parquet']" \
    data.val_files="['$GSM8K/test.parquet','$MATH/test.parquet']" \
    data.train_batch_size=1024 \
    data.max_prompt_length=4096 \
    data.max_response_length=4096 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000 \
    critic.optim.lr=1e-5 \
    critic.model.path="$MODEL" \
    critic.use_dynamic_bsz=True \
    critic.ppo_max_token_len_per_gpu=32768 \
    trainer.project_name=paddock_ppo \
    trainer.experiment_name=qwen2-7b_seq_balance_math \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.balance_batch=True \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
