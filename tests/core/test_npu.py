"""Ascend devices, as far as they can be met without one: torch's out-of-tree device stands in for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from tiny_models import save_tiny

from paddock.commands import preflight
from paddock.core import device
from paddock.errors import UserError
from paddock.estimate.job import hardware
from paddock.facts.machine import GIB, Machine
from paddock.loading.load import load

ASCEND = Path(__file__).parent / "ascend"
BARE = Machine("npu", 16, 64 * GIB, 512 * GIB, 64, frozenset({"ray"}))
ROLLOUT = "actor_rollout_ref.rollout"


def test_without_torch_npu_the_user_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # as if it were not there
    with pytest.raises(UserError, match="torch_npu") as refused:
        device.device_of("npu")
    assert (refused.value.key, refused.value.value) == ("trainer.device", "npu") and "CANN" in str(refused.value.fix)
    config = load(["trainer.device=npu"], BARE).config
    with pytest.raises(UserError, match="torch_npu") as refused:
        preflight.check(config, BARE)
    assert refused.value.key == "trainer.device"


def test_the_door_says_so_with_status_two():
    command = [sys.executable, "-m", "paddock.cli", "train", "trainer.device=npu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "torch_npu" in done.stderr and "Traceback" not in done.stderr


def test_names_of_the_vendor_are_those_of_ascend():
    assert device.collective_backend("npu") == "cpu:gloo,npu:hccl"
    assert device.RESOURCE["npu"] == "NPU"


def test_recipes_for_ascend_are_the_default_and_the_users_word_is_kept():
    found = load(["trainer.device=npu"], BARE)
    rollout = found.config.actor_rollout_ref.rollout
    assert (rollout.gpu_memory_utilization, rollout.enable_chunked_prefill) == (0.3, False)
    said = [f"{ROLLOUT}.gpu_memory_utilization=0.7", f"{ROLLOUT}.enable_chunked_prefill=True"]
    rollout = load(["trainer.device=npu", *said], BARE).config.actor_rollout_ref.rollout
    assert (rollout.gpu_memory_utilization, rollout.enable_chunked_prefill) == (0.7, True)
    rollout = load(["trainer.device=cuda"], BARE).config.actor_rollout_ref.rollout
    assert (rollout.gpu_memory_utilization, rollout.enable_chunked_prefill) == (0.6, True)


def test_a_plan_for_ascend_has_sixteen_devices_a_node_of_64_gib():
    laptop = Machine("cpu", 0, None, 16 * GIB, 8, frozenset())
    config = load(["trainer.device=npu", "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct"], laptop).config
    planned = hardware(config, None, laptop)
    assert (planned.gpus, planned.gpus_per_node, planned.memory_bytes) == (16, 16, 64 * GIB)


@pytest.fixture(scope="module")
def library(tmp_path_factory: Any) -> Path:
    if not shutil.which("g++"):
        pytest.skip("the stand-in is compiled, and there is no g++")
    found = tmp_path_factory.mktemp("standin") / "device.so"
    home = Path(torch.__file__).parent
    include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    link = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    built = ["g++", "-std=c++20", "-fPIC", "-shared", "-w", *include, str(ASCEND / "device.cpp"), "-o", str(found)]
    subprocess.run([*built, *link], check=True)
    return found


def run(kind: str, path: str, dtype: str, library: Path) -> dict[str, Any]:
    paths = os.pathsep.join(map(str, (ASCEND, ROOT / "tests", ROOT)))
    environment = os.environ | {"PYTHONPATH": paths, "PADDOCK_STANDIN": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ASCEND / "run.py"), kind, path, dtype]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_that_no_other_module_knows_trains_and_generates_as_a_cpu_does(library, tmp_path, dtype):
    """Log-probs, rollouts of both engines, updates with activations on the host, and what is saved."""
    path = str(save_tiny(tmp_path, "qwen2"))
    there, here = run("npu", path, dtype, library), run("cpu", path, dtype, library)
    assert (there["device"], here["device"]) == ("npu:0", "cpu")
    close = 1e-4 if dtype == "float32" else 0.05
    mask = torch.tensor(there["mask"]).bool()
    both = [torch.tensor(one["log_probs"])[mask] for one in (there, here)]
    torch.testing.assert_close(*both, atol=close, rtol=0.0)
    assert there["norms"] == pytest.approx(here["norms"], rel=close)
    if dtype == "float32":
        assert there["tokens"] == here["tokens"] and there["tokens"][0] == there["tokens"][1]
    assert bool(there["attended"]) == (dtype == "bfloat16")  # Ascend's kernel takes narrow types alone
    assert there["streams"]  # activations travelled beside the work
    peak, now = there["memory"]
    assert 0 < now <= peak < 64 * GIB
    for present, idle in there["idle"]:  # weights and both moments have left
        assert present - idle > 2.9 * there["weights"]
    saved = {file.name for file in (tmp_path / "saved-npu").iterdir()}
    assert saved == {file.name for file in (tmp_path / "saved-cpu").iterdir()} and "model.safetensors" in saved
