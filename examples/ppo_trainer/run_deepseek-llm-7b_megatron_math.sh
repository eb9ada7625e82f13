#!/usr/bin/env bash
# PPO on GSM8K and MATH with deepseek-llm-7b-chat; actor and critic in the Megatron engine.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   40 GiB of 80 GiB a device, 206 GiB of each host (paddock plan)
# time:     about 1.8 min a step, 6.4 h for 210 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
#           paddock data math  --local_save_dir $HOME/data/math
# plan:     paddock run --plan run_deepseek-llm-7b_megatron_math.sh
# run:      bash run_deepseek-llm-7b_megatron_math.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-deepseek-ai/deepseek-llm-7b-chat}
GSM8K=${GSM8K:-$HOME/data/gsm8k}
MATH=${MATH:-$HOME/data/math}

python3 -m paddock.trainer.main_ppo \
    --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=gae \
    data.train_files="['$GSM8K/train.parquet','$MATH/train.parquet']" \
    data.val_files="['$GSM8K/test.parquet','$MATH/test.parquet']" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.param_offload=True \
    actor_rollout_ref.actor.megatron.optimizer_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    critic.optim.lr=1e-5 \
    critic.model.path="$MODEL" \
    critic.ppo_max_token_len_per_gpu=8192 \
    critic.megatron.tensor_model_parallel_size=2 \
    critic.megatron.pipeline_model_parallel_size=2 \
    critic.megatron.param_offload=True \
    critic.megatron.optimizer_offload=True \
    trainer.project_name=paddock_ppo \
    trainer.experiment_name=deepseek-llm-7b_megatron_math \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
