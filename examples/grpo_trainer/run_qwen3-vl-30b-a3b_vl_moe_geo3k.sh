#!/usr/bin/env bash
# GRPO on Geometry3K with Qwen3-VL-30B-A3B-Instruct: a mixture of experts that sees. The image tower stays as it is.
#
# hardware: 1 node x 8 h200 (141 GiB each)
# memory:   127 GiB of 141 GiB a device, 401 GiB of each host (paddock plan)
# time:     about 2.3 min a step, 4.6 h for 120 steps (paddock plan, every response of full length)
# data:     paddock data geo3k --local_save_dir $HOME/data/geo3k
# plan:     paddock run --plan run_qwen3-vl-30b-a3b_vl_moe_geo3k.sh
# run:      bash run_qwen3-vl-30b-a3b_vl_moe_geo3k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-VL-30B-A3B-Instruct}
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
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
    actor_rollout_ref.actor.freeze_vision_tower=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=qwen3-vl-30b-a3b_vl_moe_geo3k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
