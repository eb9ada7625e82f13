#!/usr/bin/env bash
# GRPO in a game of several turns on the embedded model: the environment thinks of a digit and answers every guess with
# > (larger), < (smaller) or # (no digit). The sooner the digit is found, the more is paid. No network, no GPU.
#
# hardware: a laptop, CPU only
# memory:   under 1 GiB of RAM (paddock plan)
# time:     about 1.3 s a step on one core, 2 min for 80 steps (measured, in CPU time)
# data:     none: the environment asks
# plan:     paddock run --plan guess_the_number.sh
# run:      bash guess_the_number.sh [key=value ...]    (these win over the ones below)
set -euo pipefail

python3 -m paddock.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    environment=builtin:guess \
    trainer.experiment_name=guess_the_number \
    "$@"
