#!/usr/bin/env bash
# GRPO on Geometry3K with Qwen2.5-VL-7B-Instruct on Ascend NPUs.
#
# hardware: 1 node x 16 910b (64 GiB each)
# memory:   57 GiB of 64 GiB a device, 108 GiB of each host (paddock plan)
# time:     about 4.5 min a step, 4.5 h for 60 steps (paddock plan, every response of full length)
# data:     paddock data geo3k --local_save_dir $HOME/data/geo3k
# plan:     paddock run --plan run_qwen2.5-vl-7b_vl_npu_geo3k.sh
# run:      bash run_qwen2.5-vl-7b_vl_npu_geo3k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}
DATA=${DATA:-$HOME/data/geo3k}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.image_key=images \
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
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.enforce_eager=True \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=qwen2.5-vl-7b_vl_npu_geo3k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=16 \
    trainer.device=npu \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
