#!/usr/bin/env bash
# GRPO on MATH with Moonlight-16B-A3B-Instruct (latent attention, 64 experts) and the Megatron engine.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   48 GiB of 80 GiB a device, 244 GiB of each host (paddock plan)
# time:     about 99 s a step, 12 h for 435 steps (paddock plan, every response of full length)
# data:     paddock data math --local_save_dir $HOME/data/math
# plan:     paddock run --plan run_moonlight-16b-a3b_megatron_moe_math.sh
# run:      bash run_moonlight-16b-a3b_megatron_moe_math.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-moonshotai/Moonlight-16B-A3B-Instruct}
DATA=${DATA:-$HOME/data/math}

python3 -m paddock.trainer.main_ppo \
    --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
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
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=moonlight-16b-a3b_megatron_moe_math \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
