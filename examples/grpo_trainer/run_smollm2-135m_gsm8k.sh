#!/usr/bin/env bash
# GRPO on GSM8K with SmolLM2-135M-Instruct, small enough for a laptop: no GPU, no Ray, no hub.
# `paddock models get smollm2-135m-instruct --out $HOME/models/smollm2-135m-instruct` brings the model.
# It seldom writes the "####" that the rule looks for, so the last number of an answer counts.
#
# hardware: a laptop, CPU only
# memory:   4 GiB of RAM (paddock plan)
# time:     about 75 s a step on one core, 2.1 h for 100 steps (measured over two steps)
# data:     paddock data gsm8k --local_save_dir $HOME/data/gsm8k
# plan:     paddock run --plan run_smollm2-135m_gsm8k.sh
# run:      bash run_smollm2-135m_gsm8k.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

MODEL=${MODEL:-$HOME/models/smollm2-135m-instruct}
DATA=${DATA:-$HOME/data/gsm8k}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.val_max_samples=64 \
    data.train_batch_size=8 \
    data.max_prompt_length=256 \
    data.max_response_length=256 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=4 \
    +reward_model.compute_score_kwargs.method=flexible \
    trainer.project_name=paddock_grpo \
    trainer.experiment_name=smollm2-135m_gsm8k \
    trainer.device=cpu \
    trainer.val_before_train=False \
    trainer.save_freq=50 \
    trainer.test_freq=50 \
    trainer.total_training_steps=100 \
    "$@"
