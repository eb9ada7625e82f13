#!/usr/bin/env bash
# PPO with a reward model, end to end on the embedded model: no network, no GPU, some ten minutes of one core.
#   1. a reward model learns from preference pairs of the built-in addition task: right sums against wrong ones
#   2. PPO trains the policy with that reward model alone; the rule that knows the sums only validates
#   3. held-out sums, sampled, before and after
# Overrides for PPO may follow: run_tiny_rm.sh trainer.total_training_steps=40
set -euo pipefail

OUT=${OUT:-checkpoints/tiny_rm}
SEED=${SEED:-1}
PADDOCK=${PADDOCK:-paddock}
STEPS=80

# its defaults are the embedded model, builtin:addition/pairs to learn and builtin:addition/pairs_test to validate
$PADDOCK rm train \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$OUT/reward_model"

$PADDOCK train \
    algorithm.adv_estimator=gae \
    reward_model.enable=True \
    reward_model.model.path="$OUT/reward_model/huggingface" \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.05 \
    trainer.total_training_steps=$STEPS \
    trainer.save_freq=$STEPS \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$OUT/ppo" \
    "$@"

SAMPLED="data=builtin:addition/test data.max_prompt_length=16 data.max_response_length=8 rollout.dtype=float32
    rollout.val_kwargs.n=4 rollout.val_kwargs.do_sample=True rollout.val_kwargs.temperature=1.0"
echo "Held-out sums, sampled (mean@4), before PPO:"
# shellcheck disable=SC2086
$PADDOCK eval model=builtin:tiny $SAMPLED
echo "and after:"
# shellcheck disable=SC2086
$PADDOCK eval model="$OUT/ppo" $SAMPLED
