#!/usr/bin/env bash
# GRPO on MATH with DeepSeek-V3 (671B, 37B active) on 256 GPUs: tensor 8, pipeline 16, experts over 16.
# Take weights in bf16: the published fp8 ones have to be converted first.
#
# hardware: 32 nodes x 8 h100 (80 GiB each)
# memory:   56 GiB of 80 GiB a device, 354 GiB of each host (paddock plan)
# time:     about 7.8 min a step, 57 h for 435 steps (paddock plan, every response of full length)
# data:     paddock data math --local_save_dir $HOME/data/math
# plan:     paddock run --plan run_deepseek-v3-671b_megatron_moe_math.sh
# run:      bash run_deepseek-v3-671b_megatron_moe_math.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-deepseek-ai/DeepSeek-V3}
DATA=${DATA:-$HOME/data/math}

python3 -m paddock.trainer.main_ppo \
    --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=4096 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5120 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=16 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=16 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    actor_rollout_ref.actor.megatron.param_offload=True \
    actor_rollout_ref.actor.megatron.optimizer_offload=True \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=32 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=deepseek-v3-671b_megatron_moe_math \
    trainer.nnodes=32 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
