#!/usr/bin/env bash
# GRPO on MATH with Seed-OSS-36B-Instruct on four nodes, states on the host while they rest.
#
# hardware: 4 nodes x 8 h100 (80 GiB each)
# memory:   48 GiB of 80 GiB a device, 118 GiB of each host (paddock plan)
# time:     about 4.2 min a step, 15 h for 210 steps (paddock plan, every response of full length)
# data:     paddock data math --local_save_dir $HOME/data/math
# plan:     paddock run --plan run_seed-oss-36b_math.sh
# run:      bash run_seed-oss-36b_math.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-ByteDance-Seed/Seed-OSS-36B-Instruct}
DATA=${DATA:-$HOME/data/math}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=seed-oss-36b_math \
    trainer.nnodes=4 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
