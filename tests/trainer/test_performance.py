"""What a step cost, worked by hand and in a run."""

from __future__ import annotations

import json
from mmap import mmap

import pytest
import torch

from paddock.core.balance import balanced_order
from paddock.core.batch import Batch
from paddock.core.device import memory_in_use
from paddock.facts.models import ModelShape, shape_of
from paddock.loading.load import load
from paddock.trainer import performance
from paddock.trainer.reinforcement import train
from paddock.workers import role


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_a_run_says_what_share_of_a_known_device_it_used(tmp_path, monkeypatch, estimator):
    monkeypatch.setattr(role, "device_name", lambda device: "NVIDIA A10")
    keys = [f"algorithm.adv_estimator={estimator}", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=1",
            "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.logger=[file]",
            "data.dataloader_num_workers=0", f"trainer.default_local_dir={tmp_path}"]  # fmt: skip
    config = load(keys).config
    train(config)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    lengths = "global_seqlen/min", "global_seqlen/max", "global_seqlen/balanced_min", "global_seqlen/mean"
    assert [line[name] for name in lengths] == [line["perf/total_num_tokens"]] * 4
    used = {name.removeprefix("perf/mfu/"): value for name, value in line.items() if name.startswith("perf/mfu/")}
    assert used.keys() == {"actor", "actor_infer"} | ({"critic"} if estimator == "gae" else set())
    shape, epochs = shape_of(config.actor_rollout_ref.model.path), config.actor_rollout_ref.actor.ppo_epochs
    mean = line["perf/total_num_tokens"] / 8
    least = epochs * performance.model_flops(shape, [mean] * 8)  # rows of one length have the smallest squares
    seconds = line["timing_s/update_actor"] * 125e12
    assert least / seconds <= used["actor"] <= 1.1 * least / seconds
    assert "perf/max_memory_allocated_gb" not in line  # of a CPU


def test_balance_metrics_show_what_balancing_gained():
    lengths = [10, 9, 2, 1]
    found = performance.balance_metrics(lengths, balanced_order(lengths, 2))
    assert found == {
        "global_seqlen/min": 3.0, "global_seqlen/max": 19.0, "global_seqlen/minmax_diff": 16.0,
        "global_seqlen/balanced_min": 11.0, "global_seqlen/balanced_max": 11.0, "global_seqlen/mean": 11.0,
    }  # fmt: skip


def test_throughput_is_per_device_and_memory_is_measured():
    batch = Batch(
        row=torch.arange(3), group=torch.arange(3), prompts=torch.zeros(3, 4), lengths=torch.tensor([3, 2, 0]),
        prompt_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]),
    )  # fmt: skip
    assert performance.token_counts(batch) == (5, 13)
    found = performance.throughput_metrics(1200, seconds=3.0, devices=4, memory=(2 * 1024**3, 3 * 1024**3))
    assert found["perf/total_num_tokens"] == 1200.0 and found["perf/time_per_step"] == 3.0
    assert found["perf/throughput"] == 100.0
    assert (found["perf/max_memory_allocated_gb"], found["perf/max_memory_reserved_gb"]) == (2.0, 3.0)
    before = memory_in_use(torch.device("cpu"))
    with mmap(-1, 64 * 1024**2) as held:  # pages that no hole in the heap can be
        held.write(b"1" * len(held))
        assert memory_in_use(torch.device("cpu")) - before > 48 * 1024**2
    assert "perf/max_memory_allocated_gb" not in performance.throughput_metrics(1, 1.0, 1)


def test_utilisation_is_the_models_arithmetic_over_the_devices_peak():
    shape = ModelShape("m", "llama", hidden=8, layers=2, heads=2, kv_heads=2, head_dim=4, intermediate=16, vocab=32,
                       max_positions=64)  # fmt: skip
    products = shape.parameters - 32 * 8
    forward = 2 * products * 30 + 2 * 2 * 8 * (10**2 + 20**2)
    assert performance.model_flops(shape, [10, 20], backward=False) == forward
    assert performance.mfu(shape, [10, 20], 2.0, 4, "NVIDIA A100-SXM4-80GB") == 3 * forward / (2.0 * 4 * 312e12)
    assert performance.mfu(shape, [10, 20], 2.0, 4, "Quantum 9000") is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165)],
)
def test_peak_flops_are_found_by_whole_words_of_the_device_name(name, tera):
    assert performance.peak_flops(name) == tera * 1e12
