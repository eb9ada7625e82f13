#!/usr/bin/env bash
# Hands a run to a Ray cluster that is up: bash submit_ray_job.sh key=value ...
#   RAY_API_SERVER_ADDRESS   its dashboard, http://HEAD:8265 by default
#   NODES, GPUS_PER_NODE     what the run asks for
# Model, data and trainer.default_local_dir must be at paths that every node has.
set -euo pipefail

export RAY_API_SERVER_ADDRESS="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}"
NODES="${NODES:-2}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"

# Ray sets RAY_ADDRESS for the job, so the run joins this cluster and starts none of its own.
exec ray job submit --submission-id "paddock-$(date +%Y%m%d-%H%M%S)" -- \
    python -m paddock.trainer.main_ppo \
    trainer.nnodes="$NODES" trainer.n_gpus_per_node="$GPUS_PER_NODE" \
    trainer.max_restarts=3 trainer.save_freq=20 \
    "$@"
