#!/usr/bin/env bash
# RLOO on MATH with Qwen2-7B-Instruct: more answers, longer ones, a smaller step and a stronger pull to the reference.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   59 GiB of 80 GiB a device, 14 GiB of each host (paddock plan)
# time:     about 5.4 min a step, 25 h for 280 steps (paddock plan, every response of full length)
# data:     paddock data math --local_save_dir $HOME/data/math
# plan:     paddock run --plan run_qwen2-7b_math.sh
# run:      bash run_qwen2-7b_math.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
DATA=${DATA:-$HOME/data/math}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=5e-7 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.002 \
    trainer.project_name=paddock_rloo \
    trainer.experiment_name=qwen2-7b_math \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=20 \
    "$@"
