#!/usr/bin/env bash
# GRPO on Python tasks with Qwen2.5-3B-Instruct: programs are run in the local sandbox and scored by their tests.
# Trains on MBPP, validates on HumanEval: 128 tasks x 8 programs a step.
# No service is needed; any Linux with user namespaces will do.
#
# hardware: 1 node x 8 h100 (80 GiB each)
# memory:   53 GiB of 80 GiB a device (paddock plan)
# time:     about 27 s a step, 14 min for 30 steps (paddock plan, every response of full length)
# data:     paddock data mbpp      --local_save_dir $HOME/data/mbpp
#           paddock data humaneval --local_save_dir $HOME/data/humaneval
# plan:     paddock run --plan run_qwen2.5-3b_sandbox.sh
# run:      bash run_qwen2.5-3b_sandbox.sh [key=value ...]    (these win over the ones below)
# HumanEval's tasks as training rows: data.train_files=$HOME/data/humaneval/test.parquet
# A SandboxFusion service instead:    reward_model.sandbox_fusion.url=http://host:8080/run_code
set -euo pipefail

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$HOME/data/mbpp/train.parquet" \
    data.val_files="$HOME/data/humaneval/test.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    reward_model.reward_manager=prime \
    reward_model.sandbox.isolation=auto \
    reward_model.sandbox.timeout=5 \
    reward_model.sandbox_fusion.memory_limit_mb=512 \
    trainer.logger='["console"]' \
    trainer.project_name=paddock_sandbox_example \
    trainer.experiment_name=qwen2.5_3b_mbpp \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
