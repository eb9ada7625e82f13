#!/usr/bin/env bash
# RLOO on Python tasks with Qwen3-4B-Instruct-2507: programs run in the local sandbox and are scored by their tests.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   54 GiB of 80 GiB a device, 7 GiB of each host (paddock plan)
# time:     about 42 s a step, 21 min for 30 steps (paddock plan, every response of full length)
# data:     paddock data mbpp --local_save_dir $HOME/data/mbpp
#           paddock data humaneval --local_save_dir $HOME/data/humaneval
# plan:     paddock run --plan run_qwen3-4b_code.sh
# run:      bash run_qwen3-4b_code.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-4B-Instruct-2507}
TRAIN=${TRAIN:-$HOME/data/mbpp/train.parquet}
TEST=${TEST:-$HOME/data/humaneval/test.parquet}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    data.train_files="$TRAIN" \
    data.val_files="$TEST" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    reward_model.reward_manager=prime \
    reward_model.sandbox.timeout=5 \
    reward_model.sandbox_fusion.memory_limit_mb=512 \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.project_name=paddock_rloo \
    trainer.experiment_name=qwen3-4b_code \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=-1 \
    trainer.test_freq=2 \
    trainer.total_epochs=15 \
    "$@"
