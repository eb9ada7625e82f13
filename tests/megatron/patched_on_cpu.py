"""For `actor_rollout_ref.model.external_lib`, which every worker imports first."""

import on_cpu

on_cpu.patch()
