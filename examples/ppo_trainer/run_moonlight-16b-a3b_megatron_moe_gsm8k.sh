#!/usr/bin/env bash
# PPO on GSM8K with Moonlight-16B-A3B-Instruct as actor and critic, experts over eight GPUs.
#
# hardware: 2 nodes x 8 h100 (80 GiB each)
# memory:   40 GiB of 80 GiB a device, 241 GiB of each host (paddock plan)
# time:     about 5.3 s a step, 38 min for 435 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
# plan:     paddock run --plan run_moonlight-16b-a3b_megatron_moe_gsm8k.sh
# run:      bash run_moonlight-16b-a3b_megatron_moe_gsm8k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-moonshotai/Moonlight-16B-A3B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}

python3 -m paddock.trainer.main_ppo \
    --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=gae \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
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
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    critic.optim.lr=1e-5 \
    critic.model.path="$MODEL" \
    critic.ppo_max_token_len_per_gpu=6144 \
    critic.megatron.tensor_model_parallel_size=4 \
    critic.megatron.expert_model_parallel_size=8 \
    critic.megatron.expert_tensor_parallel_size=1 \
    critic.megatron.param_offload=True \
    critic.megatron.optimizer_offload=True \
    trainer.project_name=paddock_ppo \
    trainer.experiment_name=moonlight-16b-a3b_megatron_moe_gsm8k \
    trainer.nnodes=2 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
