#!/usr/bin/env bash
# GRPO on MATH with Qwen3-8B, SGLang on Ascend NPUs, answers of up to 32k tokens shared by four devices.
#
# hardware: 1 node x 16 910b (64 GiB each)
# memory:   32 GiB of 64 GiB a device, 107 GiB of each host (paddock plan)
# time:     about 14 min a step, 4.6 days for 468 steps (paddock plan, every response of full length)
# data:     paddock data math --local_save_dir $HOME/data/math
# plan:     paddock run --plan run_qwen3-8b_sglang_npu_32k_math.sh
# run:      bash run_qwen3-8b_sglang_npu_32k_math.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=${DATA:-$HOME/data/math}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=2048 \
    data.max_response_length=32768 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8704 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=ascend \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=qwen3-8b_sglang_npu_32k_math \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=16 \
    trainer.device=npu \
    trainer.balance_batch=True \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=1 \
    "$@"
