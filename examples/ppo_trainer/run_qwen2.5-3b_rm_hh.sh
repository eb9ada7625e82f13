#!/usr/bin/env bash
# PPO from human preferences with Qwen2.5-3B-Instruct: a reward model of 3B scores helpful and harmless dialogues, KL to
# the start keeps the policy from pleasing it alone. All four models share one GPU.
#
# hardware: 1 node x 1 h200 (141 GiB each)
# memory:   127 GiB of 141 GiB a device (paddock plan)
# time:     about 31 s a step, 7.5 h for 875 steps (paddock plan, every response of full length)
# data:     paddock data full_hh_rlhf --split rl --local_save_dir $HOME/data/full_hh_rlhf/rl
# plan:     paddock run --plan run_qwen2.5-3b_rm_hh.sh
# run:      bash run_qwen2.5-3b_rm_hh.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
REWARD_MODEL=${REWARD_MODEL:-Skywork/Skywork-Reward-V2-Llama-3.2-3B}
DATA=${DATA:-$HOME/data/full_hh_rlhf/rl}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \
    critic.optim.lr=1e-5 \
    critic.model.path="$MODEL" \
    critic.ppo_max_token_len_per_gpu=8192 \
    reward_model.enable=True \
    reward_model.model.path="$REWARD_MODEL" \
    reward_model.use_dynamic_bsz=True \
    reward_model.forward_max_token_len_per_gpu=8192 \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.project_name=paddock_ppo \
    trainer.experiment_name=qwen2.5-3b_rm_hh \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=1 \
    "$@"
