#!/usr/bin/env bash
# GRPO on helpful and harmless dialogues with Mistral-Nemo-Instruct-2407 and LoRA; a reward model of 8B scores.
# Policy, adapters off (the reference) and reward model share one GPU.
#
# hardware: 1 node x 1 h200 (141 GiB each)
# memory:   127 GiB of 141 GiB a device (paddock plan)
# time:     about 62 s a step, 30 h for 1750 steps (paddock plan, every response of full length)
# data:     paddock data full_hh_rlhf --split rl --local_save_dir $HOME/data/full_hh_rlhf/rl
# plan:     paddock run --plan run_mistral-nemo-12b_lora_rm_hh.sh
# run:      bash run_mistral-nemo-12b_lora_rm_hh.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-mistralai/Mistral-Nemo-Instruct-2407}
REWARD_MODEL=${REWARD_MODEL:-Skywork/Skywork-Reward-Llama-3.1-8B}
DATA=${DATA:-$HOME/data/full_hh_rlhf/rl}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    reward_model.enable=True \
    reward_model.model.path="$REWARD_MODEL" \
    reward_model.use_dynamic_bsz=True \
    reward_model.forward_max_token_len_per_gpu=8192 \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=mistral-nemo-12b_lora_rm_hh \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=1 \
    "$@"
