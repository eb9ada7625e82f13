"""The script that measures a server beside the trainer: its keys, bytes, bound and rows; and a run of it with vLLM."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from paddock.config.topology import device_count, pools
from paddock.loading.load import load

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")  # scripts import their neighbours
    import server_pool

QWEN = "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B"
DATA = ["data.train_files=builtin:addition/train", "data.val_files=[]", "algorithm.adv_estimator=grpo"]
WEIGHTS = 1_543_714_304


def test_engines_are_chosen_by_name() -> None:
    assert server_pool.parse([]).engines == ["vllm", "embedded"]
    assert server_pool.parse(["--engines", "embedded"]).engines == ["embedded"]
    with pytest.raises(SystemExit):
        server_pool.parse(["--engines", "vllm,hf"])


def test_the_keys_put_a_server_beside_the_trainer_on_one_device() -> None:
    keys = ["trainer.device=cuda", "trainer.n_gpus_per_node=1", QWEN, *DATA]
    beside = load([*keys, *server_pool.keys_of("vllm", 0.25, "cuda")]).config
    embedded = load([*keys, *server_pool.keys_of("embedded", 0.25, "cuda")]).config
    assert [pool.name for pool in pools(beside)] == ["main", "rollout"] and device_count(pools(beside)) == 1
    assert beside.actor_rollout_ref.rollout.gpu_memory_utilization == 0.25
    assert [pool.name for pool in pools(embedded)] == ["main"]
    budgets = {config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu for config in (beside, embedded)}
    assert budgets == {server_pool.GPU_BUDGET}


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_a_sync_sends_every_weight_in_the_type_of_the_trainer(dtype: str, size: int) -> None:
    keys = ["trainer.device=cuda", QWEN, *DATA, f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}"]
    assert server_pool.sync_bytes(load(keys).config) == size * WEIGHTS


def test_the_bound_of_a_sync_reads_and_writes_every_byte_once() -> None:
    assert server_pool.sync_bound(2 * WEIGHTS, 4.0e12) == pytest.approx(4 * WEIGHTS / 4.0e12)


def test_a_step_leaves_out_what_the_script_added() -> None:
    metrics = {"timing_s/step": 20.0, "timing_s/gen": 12.0, "timing_s/old_log_prob": 1.0, "timing_s/update_actor": 4.0}
    sync = server_pool.Sync(before=0.5, after=0.004, sending=1.5, checking=0.25, added=0.5)
    found = server_pool.row("qwen2.5-1.5b", "vllm", 2, metrics, sync, (0.003, 0.2), 3_000_000_000, 4.0e12)
    assert found == (
        "| qwen2.5-1.5b | vllm | 2 | 19.50 | 12.00 | 1.00 | 4.00 | 1.75 | 1.50 | 3.000 | 2.00 | 0.0015 | 0.5 | 0.004 "
        "| 0.003 | 0.2 |"
    )
    bare = server_pool.row("qwen2.5-1.5b", "embedded", 2, metrics, None, None, 3_000_000_000, 4.0e12)
    assert bare.count("|") == found.count("|") == server_pool.HEAD.splitlines()[0].count("|")
    assert "| 20.00 | 12.00 |" in bare


@pytest.mark.vllm
def test_the_script_trains_with_a_real_server_and_shows_what_a_sync_repairs() -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("ray")
    script = [sys.executable, str(ROOT / "benchmarks/server_pool.py"), "--shape", "smallest", "--device", "cpu"]
    for role in ("actor.fsdp_config", "rollout"):  # the bound is float32's: a CPU that multiplies bf16 is 4e-4 apart
        script += ["--set", f"actor_rollout_ref.{role}.dtype=float32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*script, "--steps", "2"], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    head, steps = rows[0], [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert [(step["engine"], step["step"]) for step in steps] == [
        ("vllm", "1"), ("vllm", "2"), ("embedded", "1"), ("embedded", "2"),
    ]  # fmt: skip
    for step in steps[:2]:
        assert float(step["gap before"]) > 10 * float(step["after"]) and float(step["after"]) < 1e-4
        assert float(step[head[-1]]) < 1e-4
    assert "server " in done.stdout and "ray " in done.stdout
