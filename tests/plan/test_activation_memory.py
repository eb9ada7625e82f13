"""What a plan makes of activations that wait on the host."""

from __future__ import annotations

from paddock.estimate.job import job
from paddock.estimate.memory import offloaded as on_the_host
from paddock.estimate.memory import update_work
from paddock.facts.machine import GIB, Machine
from paddock.loading.load import load

NODE = Machine("cuda", 8, 80 * GIB, 1024 * GIB, 64, frozenset({"ray"}))
SETTINGS = [
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
    "data.max_prompt_length=1024", "data.max_response_length=31744",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768", "algorithm.adv_estimator=grpo",
]  # fmt: skip


def planned(offload: bool) -> tuple[int, int]:
    """Bytes of activations on the device in an update, and bytes on the host of a node."""
    config = load([*SETTINGS, f"actor_rollout_ref.model.enable_activation_offload={offload}"], NODE).config
    found = job(config, machine=NODE)
    assert found is not None
    return update_work(found, found.actor)["activations"], on_the_host(found)


def test_inputs_of_all_layers_but_three_leave_the_device_and_fill_the_host():
    (there, host), (left, filled) = planned(False), planned(True)
    one_layer = 32768 * 3584 * 2
    assert there - left == (28 - 3) * one_layer
    assert filled - host == 8 * 28 * one_layer
