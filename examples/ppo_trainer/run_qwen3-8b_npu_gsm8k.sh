#!/usr/bin/env bash
# PPO on GSM8K with Qwen3-8B on Ascend NPUs.
#
# hardware: 1 node x 16 910b (64 GiB each)
# memory:   26 GiB of 64 GiB a device, 176 GiB of each host (paddock plan)
# time:     about 54 s a step, 94 min for 105 steps (paddock plan, every response of full length)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
# plan:     paddock run --plan run_qwen3-8b_npu_gsm8k.sh
# run:      bash run_qwen3-8b_npu_gsm8k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=${DATA:-$HOME/data/gsm8k}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.enable_chunked_prefill=False \
    actor_rollout_ref.rollout.enforce_eager=True \
    critic.optim.lr=1e-5 \
    critic.model.path="$MODEL" \
    critic.ppo_max_token_len_per_gpu=8192 \
    critic.model.fsdp_config.param_offload=True \
    critic.model.fsdp_config.optimizer_offload=True \
    trainer.project_name=paddock_ppo \
    trainer.experiment_name=qwen3-8b_npu_gsm8k \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=16 \
    trainer.device=npu \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
