"""Time by hand, and beside what one H200 was measured to take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT

from paddock.config.load import load
from paddock.config.memory.job import job as job_of
from paddock.config.memory.model import GIB, Hardware, Job, Role, Rollout
from paddock.config.memory.splits import Fsdp
from paddock.facts import processor
from paddock.facts.machine import GPU_MEMORY_GIB, GPU_SPEED, Machine, Speed
from paddock.facts.models import ModelShape, shape_of
from paddock.plan.duration import Work, duration, multiplied_weights, token_operations
from paddock.plan.from_config import seconds, speed_of, threads
from paddock.plan.tables import clock

H200 = GPU_SPEED["h200"]


def shape(name: str) -> ModelShape:
    found = shape_of(name)
    assert found is not None
    return found


def one_gpu(model: ModelShape, work: Work, **role: bool | int) -> Job:
    return Job(
        hardware=Hardware(1, 1, 141 * GIB),
        actor=Role(model, Fsdp(), update_tokens=65536, forward_tokens=65536, **role),  # type: ignore[arg-type]
        rollout=Rollout("embedded", rows=work.rows, row_tokens=work.row_tokens, max_sequences=1024),
    )


def test_a_token_by_hand() -> None:
    """SmolLM2-135M is tied: all its weights are multiplied; 30 layers of 9 heads of 64."""
    model, work = shape("HuggingFaceTB/SmolLM2-135M"), Work(1, 1, 100, 100)
    assert token_operations(Role(model), work) == 2 * 134_515_008 + 2 * 30 * 200 * 9 * 64


def test_a_table_that_is_looked_up_and_idle_experts_cost_nothing() -> None:
    qwen, moe = shape("Qwen/Qwen3-8B"), shape("Qwen/Qwen3-30B-A3B")
    assert multiplied_weights(Role(qwen)) == qwen.parameters - 151936 * 4096
    assert multiplied_weights(Role(moe)) == moe.active_parameters - 151936 * 2048
    critic = replace(qwen, scalar_head=True)
    assert multiplied_weights(Role(critic)) == qwen.parameters - 2 * 151936 * 4096 + 4096


def test_a_tower_runs_once_for_every_patch_of_the_tokens_that_are_images() -> None:
    model = shape("Qwen/Qwen2.5-VL-7B-Instruct")
    text, images = (multiplied_weights(Role(model, image_share=share)) for share in (0.0, 0.5))
    assert images - text == 2 * model.vision_params


def test_an_update_is_four_passes_and_fewer_without_recomputing_or_with_adapters() -> None:
    model, work = shape("Qwen/Qwen2.5-7B"), Work(128, 4, 512, 512)
    forward = duration(one_gpu(model, work), work, H200).phases["log_probs"]

    def update(**role: bool | int) -> float:
        return duration(one_gpu(model, work, **role), work, H200).phases["update_actor"]

    assert update() == pytest.approx(4 * forward)
    assert update(checkpointing=False) == pytest.approx(3 * forward)
    assert update(lora_rank=8) == pytest.approx(3 * forward)
    twice = replace(work, epochs=2)
    assert duration(one_gpu(model, twice), twice, H200).phases["update_actor"] == pytest.approx(8 * forward)


def test_log_probs_that_come_from_the_rollout_take_no_time() -> None:
    model, work = shape("Qwen/Qwen2.5-0.5B"), Work(8, 4, 64, 64, own_log_probs=False)
    assert "log_probs" not in duration(one_gpu(model, work), work, H200).phases


# docs/performance.md, one H200: rollouts of full length, and the update of Qwen3-0.6B by 6 N D.
@pytest.mark.parametrize(
    ("name", "prompts", "n", "prompt", "response", "measured"),
    [
        ("HuggingFaceTB/SmolLM2-135M", 128, 8, 120, 256, 0.76),
        ("Qwen/Qwen2.5-0.5B", 128, 8, 120, 256, 0.94),
        ("Qwen/Qwen3-0.6B", 256, 1, 562, 1024, 8.6),
    ],
)
def test_rollouts_take_about_what_was_measured(name, prompts, n, prompt, response, measured) -> None:
    work = Work(prompts, n, prompt, response)
    estimated = duration(one_gpu(shape(name), work), work, H200).phases["rollout"]
    assert measured / 1.6 < estimated < measured * 1.6


def test_training_runs_at_about_the_measured_rate() -> None:
    """94,000 tokens a second of Qwen3-0.6B, packed to 16k, without recomputing."""
    work = Work(8, 2, 512, 512)
    model = shape("Qwen/Qwen3-0.6B")
    update = duration(one_gpu(model, work, checkpointing=False), work, H200).phases["update_actor"]
    assert 94_000 / 1.6 < work.rows * work.row_tokens / update < 94_000 * 1.6


def test_twice_the_gpus_halve_a_step() -> None:
    def step(gpus: int) -> float:
        keys = ["actor_rollout_ref.rollout.name=vllm", f"trainer.n_gpus_per_node={gpus}", "trainer.nnodes=1"]
        config = load(["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", *keys]).config
        work = job_of(config, "h100")
        assert work is not None
        found = seconds(config, work, "h100")
        assert found is not None
        return found.step

    assert 0.45 < step(8) / step(4) < 0.75


def test_a_device_that_is_only_seen_has_no_planned_time() -> None:
    seen = Machine("cuda", 8, 80 * GIB, 512 * GIB, 64, frozenset())
    config = load(["trainer.n_gpus_per_node=8"], seen).config
    here = job_of(config, machine=seen)
    assert here is not None and seconds(config, here, machine=seen) is None
    assert here.hardware.memory_bytes == 80 * GIB


def test_a_processor_is_measured_and_a_run_on_it_has_a_time_by_its_threads(monkeypatch) -> None:
    """The embedded model is small and has one thread; a larger one has all cores, up to the memory's channels."""
    one = processor.measured()
    assert one is not None and 1e9 < one.flops < 1e13 and 1e8 < one.bandwidth < 1e12
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    eight = Machine("cpu", 0, None, 32 * GIB, 8, frozenset())
    small, large = (
        load(["trainer.device=cpu", *more], eight).config
        for more in ([], ["actor_rollout_ref.model.path=HuggingFaceTB/SmolLM2-135M"])
    )
    dtype = "actor_rollout_ref.actor.fsdp_config.dtype=float32"
    exact = load(["trainer.device=cpu", "actor_rollout_ref.model.path=HuggingFaceTB/SmolLM2-135M", dtype], eight).config
    found = {}
    for name, config in (("small", small), ("large", large), ("exact", exact)):
        work = job_of(config, machine=eight)
        assert work is not None
        found[name] = speed_of(config, work, None, eight)
        time = seconds(config, work, machine=eight)
        assert time is not None and time.step > 0
    assert found["small"] == one
    assert found["exact"] == Speed(8 * one.flops, 4 * one.bandwidth)
    assert found["large"] == Speed(8 * one.flops * processor.bf16_rate(processor.processor_flags()), 4 * one.bandwidth)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(small, eight) == threads(large, eight) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to a core")
def test_a_busy_core_is_measured_as_an_idle_one() -> None:
    def crowded(neighbours: int) -> float:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})  # children inherit it
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
        processor.measured.cache_clear()
        try:
            found = processor.measured()
        finally:
            os.sched_setaffinity(0, cores)
            processor.measured.cache_clear()
            for process in busy:
                process.kill()
                process.wait()
        assert found is not None
        return found.flops

    assert crowded(4) > 0.6 * crowded(0)


@pytest.mark.parametrize(
    ("flags", "rate"), [({"avx512f", "avx512_bf16", "amx_bf16"}, 8.0), ({"avx512_bf16"}, 1.5), ({"avx512f"}, 1.0)]
)
def test_bf16_products_take_their_time_by_what_the_processor_has(flags: set[str], rate: float) -> None:
    assert processor.bf16_rate(frozenset(flags)) == rate


def test_a_processor_that_cannot_be_measured_and_those_of_other_nodes_have_no_planned_time(monkeypatch) -> None:
    monkeypatch.setattr(processor, "PROBE", "raise SystemExit(1)")
    processor.measured.cache_clear()
    config = load(["trainer.device=cpu"]).config
    work = job_of(config)
    assert work is not None and seconds(config, work) is None
    processor.measured.cache_clear()
    config.trainer.nnodes = 2
    assert speed_of(config, work, None, Machine("cpu", 0, None, GIB, 2, frozenset())) is None


@pytest.mark.slow
def test_a_step_on_this_processor_takes_what_was_planned_within_a_factor_of_three(tmp_path) -> None:
    """A run of the embedded default, planned with the lengths that its answers had."""
    chosen = [f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=6", "trainer.save_freq=-1"]
    quiet = ["trainer.val_before_train=False", "trainer.test_freq=-1"]
    command = [sys.executable, "-m", "paddock.cli", "train", *chosen, *quiet]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
    config = load(["trainer.device=cpu"]).config
    config.data.max_prompt_length = round(steps[0]["prompt_length/mean"])
    config.data.max_response_length = round(sum(step["response_length/mean"] for step in steps) / len(steps))
    work = job_of(config)
    assert work is not None
    planned = seconds(config, work)
    measured = min(step["timing_s/step"] for step in steps)
    assert planned is not None and measured / 3 < planned.step < measured * 3


def test_npus_are_planned_for_an_npu() -> None:
    config = load(["trainer.device=npu", "trainer.n_gpus_per_node=16"]).config
    work = job_of(config)
    assert work is not None and work.hardware.memory_bytes == 64 * GIB


def test_every_device_of_the_table_has_a_speed() -> None:
    assert GPU_SPEED.keys() == GPU_MEMORY_GIB.keys()


@pytest.mark.parametrize(
    ("amount", "text"),
    [(4.24, "4.2 s"), (42, "42 s"), (252, "4.2 min"), (2520, "42 min"), (15120, "4.2 h"), (362880, "4.2 days")],
)
def test_a_time_is_read_at_a_glance(amount: float, text: str) -> None:
    assert clock(amount) == text
