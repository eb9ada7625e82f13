"""The library over several processes: the same script, and functions of the program that ranks cannot import."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from devices import ON_DEVICE

pytest.importorskip("ray")

SCRIPT = """
import json, sys
import paddock

@paddock.policy_loss("plain")
def plain(inputs, config):
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    return -inputs.advantages * ratio, {}

@paddock.estimator("centred")
def centred(batch, config):
    rewards = batch.rewards.sum(-1)
    advantages = (rewards - rewards.mean())[:, None] * batch.mask
    return advantages, advantages

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
with paddock.Run(
    data=rows, reward=lambda completion, answer: float(answer in completion), algorithm="centred", n=4, batch=4,
    steps=2, prompt_length=8, response_length=6, devices=int(sys.argv[1]), logger=["file"],
    folder=sys.argv[2],
    config={"actor_rollout_ref.actor.policy_loss.loss_mode": "plain",
            "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
            **dict(key.split("=") for key in sys.argv[3:])},
) as run:
    steps = [step.metrics["actor/grad_norm"] for step in run]
    print(json.dumps([steps, run.generate("1+1=")]))
"""


def test_a_script_with_a_loss_and_a_reward_of_its_own_trains_over_ranks_as_in_one_process(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    found = []
    for devices in (1, 2):
        command = [sys.executable, "script.py", str(devices), str(tmp_path / str(devices)),
                   *(key for key in ON_DEVICE if not key.startswith("trainer.n_gpus_per_node="))]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4) and found[0][1] == found[1][1]
