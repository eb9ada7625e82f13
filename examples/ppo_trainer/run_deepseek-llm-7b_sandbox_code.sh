#!/usr/bin/env bash
# PPO on Python tasks with deepseek-llm-7b-chat: programs run in the local sandbox and are scored by their tests.
# Trains on MBPP, validates on HumanEval. No service is needed; any Linux with user namespaces will do.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   51 GiB of 80 GiB a device (paddock plan)
# time:     about 52 s a step, 26 min for 30 steps (paddock plan, every response of full length)
# data:     paddock data mbpp --local_save_dir $HOME/data/mbpp
#           paddock data humaneval --local_save_dir $HOME/data/humaneval
# plan:     paddock run --plan run_deepseek-llm-7b_sandbox_code.sh
# run:      bash run_deepseek-llm-7b_sandbox_code.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-deepseek-ai/deepseek-llm-7b-chat}
TRAIN=${TRAIN:-$HOME/data/mbpp/train.parquet}
TEST=${TEST:-$HOME/data/humaneval/test.parquet}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$TRAIN" \
    data.val_files="$TEST" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    critic.optim.lr=1e-5 \
    critic.model.path="$MODEL" \
    critic.ppo_max_token_len_per_gpu=16384 \
    reward_model.reward_manager=prime \
    reward_model.sandbox.timeout=5 \
    reward_model.sandbox_fusion.memory_limit_mb=512 \
    trainer.project_name=paddock_ppo \
    trainer.experiment_name=deepseek-llm-7b_sandbox_code \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=-1 \
    trainer.test_freq=2 \
    trainer.total_epochs=15 \
    "$@"
