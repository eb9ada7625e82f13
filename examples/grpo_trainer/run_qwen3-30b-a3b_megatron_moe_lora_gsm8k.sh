#!/usr/bin/env bash
# GRPO on GSM8K with Qwen3-30B-A3B, LoRA in the Megatron engine: a mixture of experts on one node of 80 GB GPUs.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   48 GiB of 80 GiB a device (paddock plan)
# time:     about 53 s a step, 6.5 h for 435 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
# plan:     paddock run --plan run_qwen3-30b-a3b_megatron_moe_lora_gsm8k.sh
# run:      bash run_qwen3-30b-a3b_megatron_moe_lora_gsm8k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
DATA=${DATA:-$HOME/data/gsm8k}

python3 -m paddock.trainer.main_ppo \
    --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.lora.rank=32 \
    actor_rollout_ref.model.lora.alpha=64 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=qwen3-30b-a3b_megatron_moe_lora_gsm8k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
