#!/usr/bin/env bash
# On-policy distillation, end to end on the embedded model: no network, no GPU, some three minutes of one core.
#   1. GRPO trains the teacher on the built-in addition task, from rewards
#   2. the model as it ships learns from that teacher on answers of its own, one a prompt, without a reward
#   3. held-out sums, sampled: the student before and after, and the teacher
# Overrides for step 2 may follow: run_tiny.sh distillation.distillation_loss.loss_mode=k3
set -euo pipefail

OUT=${OUT:-checkpoints/tiny_distillation}
SEED=${SEED:-1}
PADDOCK=${PADDOCK:-paddock}
TEACHER=$OUT/teacher/global_step_80/actor
STEPS=40

$PADDOCK train \
    algorithm.adv_estimator=grpo \
    trainer.total_training_steps=80 \
    trainer.save_freq=80 \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$OUT/teacher"

$PADDOCK train \
    algorithm.adv_estimator=grpo \
    distillation.enabled=True \
    distillation.teacher_models.teacher_model.model_path="$TEACHER" \
    distillation.distillation_loss.use_task_rewards=False \
    distillation.distillation_loss.loss_mode=forward_kl_topk \
    distillation.distillation_loss.topk=16 \
    actor_rollout_ref.rollout.n=1 \
    data.train_batch_size=256 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    trainer.total_training_steps=$STEPS \
    trainer.save_freq=$STEPS \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$OUT/student" \
    "$@"

SAMPLED="data=builtin:addition/test data.max_prompt_length=16 data.max_response_length=8 rollout.dtype=float32
    rollout.val_kwargs.n=4 rollout.val_kwargs.do_sample=True rollout.val_kwargs.temperature=1.0"
for MODEL in builtin:tiny "$OUT/student" "$TEACHER"; do
    echo "Held-out sums, sampled (mean@4), by $MODEL:"
    # shellcheck disable=SC2086
    $PADDOCK eval model="$MODEL" $SAMPLED
done
