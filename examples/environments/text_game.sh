#!/usr/bin/env bash
# GRPO on Wordle of TextArena with Qwen2.5-1.5B-Instruct: 32 words x 8 games a step, at most 8 turns each.
# The game asks, answers every guess and pays; no data is needed. GAME names another game of one player.
# pip install textarena; Wordle also needs word lists:
# python -m nltk.downloader words averaged_perceptron_tagger_eng
#
# hardware: 1 node x 1 h100 (80 GiB each)
# memory:   72 GiB of 80 GiB a device (paddock plan)
# time:     about 28 s a step, 47 min for 100 steps (paddock plan, every response of full length)
# data:     none: the environment asks
# plan:     paddock run --plan text_game.sh
# run:      bash text_game.sh [key=value ...]    (these win over the ones below)
# try:      MODEL=builtin:tiny bash text_game.sh trainer.device=cpu data.train_batch_size=2 \
#               actor_rollout_ref.actor.ppo_mini_batch_size=2 trainer.total_training_steps=1
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
GAME=${GAME:-textarena:Wordle-v0}

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    environment="$GAME" \
    data.train_batch_size=32 \
    data.val_max_samples=64 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.name=embedded \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8 \
    trainer.project_name=paddock_environments \
    trainer.experiment_name=text_game \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.val_before_train=False \
    trainer.save_freq=50 \
    trainer.test_freq=25 \
    trainer.total_training_steps=100 \
    "$@"
