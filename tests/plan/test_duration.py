"""Time by hand; test_measured_times.py has it beside what one H200 took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT

from paddock.config.topology import copies_rollout_log_probs
from paddock.estimate.counts import (
    Work,
    forward_operations,
    forward_tokens,
    multiplied_weights,
    prompt_operations,
    response_operations,
    update_forwards,
)
from paddock.estimate.duration import duration, rollout_seconds
from paddock.estimate.job import job as job_of
from paddock.estimate.memory import GIB, Hardware, RoleLoad, RolloutLoad, StepLoad, estimate
from paddock.estimate.splits import Fsdp, Megatron
from paddock.facts import processor
from paddock.facts.machine import GPU_MEMORY_GIB, GPU_SPEED, Machine, Speed
from paddock.facts.models import ModelShape, shape_of
from paddock.loading.load import load
from paddock.plan.from_config import seconds, speed_of, threads
from paddock.plan.tables import clock

H200 = GPU_SPEED["h200"]


def shape(name: str) -> ModelShape:
    found = shape_of(name)
    assert found is not None
    return found


def one_gpu(model: ModelShape, work: Work, **role: bool | int) -> StepLoad:
    return StepLoad(
        hardware=Hardware(1, 1, 141 * GIB),
        roles={"actor": RoleLoad(model, **{"update_tokens": 65536, "forward_tokens": 65536, **role})},  # type: ignore[arg-type]
        rollout=RolloutLoad("embedded", rows=work.rows, row_tokens=work.prompt_tokens + work.response_tokens),
    )


def test_operations_and_bytes_by_hand() -> None:
    """SmolLM2-135M is tied: all its weights are multiplied, 49,152 x 576 of them in the head; 30 layers of 9 heads of
    64, 3 of them with keys. Two prompts of 100 tokens have three responses of 50 each."""
    role, work = RoleLoad(shape("HuggingFaceTB/SmolLM2-135M")), Work(2, 3, 100, 50)
    body = 134_515_008 - 49_152 * 576
    assert prompt_operations(role, work) == 200 * (2 * body + 4 * 30 * 576 * 50)
    assert response_operations(role, work) == 300 * (2 * 134_515_008 + 4 * 30 * 576 * 125)
    assert work.keys == 300 * 125
    assert forward_tokens(role, work) == 500
    assert forward_operations(role, work) == prompt_operations(role, work) + response_operations(role, work)


def test_a_prompt_is_computed_on_each_device_that_has_rows_of_its_group() -> None:
    model, work = shape("HuggingFaceTB/SmolLM2-135M"), Work(2, 3, 100, 50)
    assert [forward_tokens(RoleLoad(model), work, devices) for devices in (1, 2, 8)] == [500, 700, 900]
    for split in (Fsdp(degree=2, sequence=2), Megatron(world=2)):
        assert forward_tokens(RoleLoad(model, split), work) == 900
    assert forward_tokens(RoleLoad(model), replace(work, shares_prompts=False)) == 900


def test_lengths_of_their_own_are_summed() -> None:
    """Responses of 10 and 30 tokens behind 100: 40 tokens, with 10 x 105 and 30 x 115 keys."""
    work = Work(1, 2, 100, 30, (10, 30))
    assert (work.written, work.keys) == (40, 10 * 105 + 30 * 115)
    even = Work(1, 2, 100, 30)
    assert (even.written, even.keys) == (60, 60 * 115)


def test_a_decode_step_by_hand() -> None:
    """One sequence of SmolLM2 reads 269 MB of weights and 125 x 23 kB of keys and values in each of 50 steps; its 210
    kernels are launched one by one. Its 100 tokens of prompt take the rest."""
    model, work = shape("HuggingFaceTB/SmolLM2-135M"), Work(1, 1, 100, 50)
    with_prompt, without = (rollout_seconds(one_gpu(model, each), each, H200) for each in (work, Work(1, 1, 0, 50)))
    reads = 2 * 134_515_008 + 25 * 23_040 + 8 * 49_152
    assert without == pytest.approx(50 * (reads / (0.92 * 4.8e12) + 30 * 7 * 4.5e-6))
    prompt = 100 * (2 * (134_515_008 - 49_152 * 576) + 4 * 30 * 576 * 50) / (0.7 * 989e12)
    moved = 3 * 100 * 30 * 2 * 12_288 + 50 * 100 * 23_040
    assert with_prompt - without == pytest.approx(prompt + moved / (0.92 * 4.8e12))


def test_a_table_that_is_looked_up_and_idle_experts_cost_nothing() -> None:
    qwen, moe = shape("Qwen/Qwen3-8B"), shape("Qwen/Qwen3-30B-A3B")
    assert multiplied_weights(RoleLoad(qwen)) == qwen.parameters - 151936 * 4096
    assert multiplied_weights(RoleLoad(moe)) == moe.active_parameters - 151936 * 2048
    critic = replace(qwen, scalar_head=True)
    assert multiplied_weights(RoleLoad(critic)) == qwen.parameters - 2 * 151936 * 4096 + 4096


def test_a_tower_runs_once_for_every_patch_of_the_tokens_that_are_images() -> None:
    model = shape("Qwen/Qwen2.5-VL-7B-Instruct")
    text, images = (multiplied_weights(RoleLoad(model, image_share=share)) for share in (0.0, 0.5))
    assert images - text == 2 * model.vision_params


def test_an_update_is_four_passes_and_fewer_without_recomputing_or_with_adapters() -> None:
    model, work = shape("Qwen/Qwen2.5-7B"), Work(128, 4, 512, 512)
    forward = duration(one_gpu(model, work), work, H200).phases["old_log_prob"]

    def update(**role: bool | int) -> float:
        return duration(one_gpu(model, work, **role), work, H200).phases["update_actor"]

    assert update() == pytest.approx(4 * forward)
    assert update(checkpointing=False) == pytest.approx(3 * forward)
    assert [update_forwards(RoleLoad(model, lora_rank=rank, checkpointing=on))
            for rank in (0, 8) for on in (True, False)] == [4, 3, 3, 2]  # fmt: skip
    assert update(lora_rank=8) < update()
    twice = replace(work, epochs=2)
    assert duration(one_gpu(model, twice), twice, H200).phases["update_actor"] == pytest.approx(8 * forward)


def test_small_micro_batches_take_as_long_as_the_host_launches_them() -> None:
    """Of 3 x 1,000 tokens at 1,000 a micro-batch: three passes over 30 layers each, 1.2 ms a layer."""
    model, work = shape("HuggingFaceTB/SmolLM2-135M"), Work(3, 1, 500, 500)
    small = one_gpu(model, work, checkpointing=False, update_tokens=1000)
    assert duration(small, work, H200).phases["update_actor"] == pytest.approx(3 * 3 * 30 * 1.2e-3)
    on_cpu = replace(small, hardware=Hardware(0, 0, 141 * GIB))
    assert duration(on_cpu, work, H200).phases["update_actor"] < 0.02


def test_log_probs_that_come_from_the_rollout_take_no_time() -> None:
    model, work = shape("Qwen/Qwen2.5-0.5B"), Work(8, 4, 64, 64)
    job = replace(one_gpu(model, work), own_log_probs=False)
    assert "old_log_prob" not in duration(job, work, H200).phases and "old_log_prob" not in estimate(job).phases


@pytest.mark.parametrize(
    ("keys", "computed"),
    [
        ([], False),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=32"], True),
        (["actor_rollout_ref.actor.ppo_epochs=2"], True),
        (["actor_rollout_ref.rollout.name=hf"], True),
        (["actor_rollout_ref.model.lora_rank=4"], False),
        (["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=True"], False),
        (["actor_rollout_ref.rollout.name=hf", "algorithm.rollout_correction.bypass_mode=True"], False),
        (["algorithm.rollout_correction.rollout_is=token"], True),
        (["algorithm.adv_estimator=optimal_token_baseline"], True),
    ],
)
def test_old_log_probs_take_time_where_the_trainer_computes_them(keys: list[str], computed: bool) -> None:
    """One optimizer step on what the actor's own modules drew needs none."""
    config = load(["trainer.device=cpu", "actor_rollout_ref.actor.ppo_mini_batch_size=64", *keys]).config
    work = job_of(config)
    assert work is not None
    found = seconds(config, work)
    assert found is not None and ("old_log_prob" in found.phases) == computed
    assert copies_rollout_log_probs(config) != computed


def test_a_rollout_by_merged_weights_takes_the_time_of_one_without_adapters() -> None:
    def rollout(*keys: str) -> float:
        model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"
        config = load(["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", model, *keys]).config
        work = job_of(config, "h100")
        assert work is not None
        found = seconds(config, work)
        assert found is not None
        return found.phases["gen"]

    lora, merged = "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True"
    assert rollout() == rollout(lora, merged) < rollout(lora)


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
    assert found["large"] == Speed(8 * one.flops * processor.bf16_rate(), 4 * one.bandwidth)
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
def test_bf16_products_take_their_time_by_what_the_processor_has(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], rate: float
) -> None:
    monkeypatch.setattr(processor, "processor_flags", lambda: frozenset(flags))
    assert processor.bf16_rate() == rate


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
