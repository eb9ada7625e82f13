#!/usr/bin/env bash
# GRPO with a tool on the embedded model: products of two numbers, which the model cannot compute and a tool can.
# It has been warmed up to write half of its answers as a call, [mul(a=12, b=34)], and to copy most results.
# What is learnt is when to call, and to copy with care. No network, no GPU.
#
# hardware: a laptop, CPU only
# memory:   under 1 GiB of RAM (paddock plan)
# time:     about 2 s a step on one core, 3 min for 80 steps (measured, in CPU time)
# data:     built in (builtin:products)
# plan:     paddock run --plan calculator.sh
# run:      bash calculator.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    environment=builtin:calculator \
    trainer.experiment_name=calculator \
    "$@"
