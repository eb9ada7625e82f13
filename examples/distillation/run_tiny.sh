#!/usr/bin/env bash
# On-policy distillation, end to end on the embedded model: no network, no GPU, some three minutes of one core.
#   1. GRPO trains the teacher on the built-in addition task, from rewards
#   2. the model as it ships learns from that teacher on sums of its own, without a reward
#   3. held-out sums, sampled: the student before and after, and the teacher
# Overrides for step 2 may follow: run_tiny.sh distillation.distillation_loss.loss_mode=forward_kl_topk
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
    distillation.distillation_loss.loss_mode=k3 \
    trainer.total_training_steps=$STEPS \
    trainer.save_freq=$STEPS \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$OUT/student" \
    "$@"

SAMPLED="data=builtin:addition/test data.max_prompt_length=16 data.max_response_length=8 rollout.dtype=float32
    rollout.val_kwargs.n=4 rollout.val_kwargs.do_sample=True rollout.val_kwargs.temperature=1.0"
LAST=$(cat "$OUT/student/latest_checkpointed_iteration.txt")
for MODEL in builtin:tiny "$OUT/student/global_step_$LAST/actor" "$TEACHER"; do
    echo "Held-out sums, sampled (mean@4), by $MODEL:"
    # shellcheck disable=SC2086
    $PADDOCK eval model="$MODEL" $SAMPLED
done
