#!/usr/bin/env bash
# GRPO on Geometry3K, drawings and text, with Qwen2.5-VL-3B-Instruct on one GPU.
#
# hardware: 1 node x 1 h100 (80 GiB each)
# memory:   72 GiB of 80 GiB a device (paddock plan)
# time:     about 48 s a step, 6.4 h for 480 steps (paddock plan, every response of full length)
# data:     paddock data geo3k --local_save_dir $HOME/data/geo3k
# plan:     paddock run --plan run_qwen2.5-vl-3b_vl_geo3k.sh
# run:      bash run_qwen2.5-vl-3b_vl_geo3k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}
DATA=${DATA:-$HOME/data/geo3k}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.image_key=images \
    data.train_batch_size=64 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.freeze_vision_tower=True \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=qwen2.5-vl-3b_vl_geo3k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
