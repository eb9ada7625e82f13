"""A device that runs out of memory: the phase is named, with a key to lower, and what was trained before is kept.

There is no such device here, so phases raise the error that torch would raise; tests/gpu has a real one.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from paddock.cli import main
from paddock.commands.evaluation import evaluate
from paddock.config.phases import CUTS, PHASES
from paddock.core.timing import PHASE, Timer
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rollouts.collect import Collector
from paddock.trainer.assembly import Assembly
from paddock.trainer.out_of_memory import less
from paddock.trainer.reinforcement import train
from paddock.workers.policy import Policy

A, M, RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
SAID = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 12.31 GiB is "
    "free. Including non-PyTorch memory, this process has 127.48 GiB memory in use. See documentation for details."
)
SMALL = ["algorithm.adv_estimator=grpo", "data.train_batch_size=8", f"{A}.ppo_mini_batch_size=8", f"{RO}.n=4",
         "trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.val_before_train=False",
         "trainer.save_freq=-1", "trainer.logger=[file]", "data.val_max_samples=16"]  # fmt: skip


def failing(method: Any, after: int) -> Any:
    """Returns a method whose calls fail from the one behind `after` on."""
    calls = iter(range(10**6))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= after:
            raise torch.OutOfMemoryError(SAID)
        return method(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("phase", "keys", "key", "fix"),
    [
        ("update_actor", [f"{A}.ppo_max_token_len_per_gpu=16384"], f"{A}.ppo_max_token_len_per_gpu", "=8192"),
        ("update_actor", [f"{A}.ppo_max_token_len_per_gpu=1280"], f"{A}.ppo_max_token_len_per_gpu", "=640"),
        ("update_actor", [f"{A}.ppo_micro_batch_size_per_gpu=8"], f"{A}.ppo_micro_batch_size_per_gpu", "=4"),
        ("old_log_prob", [f"{RO}.log_prob_micro_batch_size_per_gpu=3"],
         f"{RO}.log_prob_micro_batch_size_per_gpu", "=1"),
        ("values", ["critic.forward_max_token_len_per_gpu=4096"], "critic.forward_max_token_len_per_gpu", "=2048"),
        ("update_actor", [f"{A}.ppo_micro_batch_size_per_gpu=1", f"{M}.enable_gradient_checkpointing=False"],
         f"{M}.enable_gradient_checkpointing", "=True"),
        ("update_actor", [f"{A}.ppo_micro_batch_size_per_gpu=1", f"{M}.enable_gradient_checkpointing=True"],
         f"{A}.ppo_micro_batch_size_per_gpu", "one row already"),
        ("gen", [f"{RO}.max_num_seqs=256"], f"{RO}.max_num_seqs", "=16"),
        ("testing", [f"{RO}.max_num_seqs=256"], f"{RO}.max_num_seqs", "=128"),
        ("testing", [f"{RO}.max_num_seqs=256", "data.val_batch_size=10"], f"{RO}.max_num_seqs", "=5"),
        ("gen", [f"{RO}.max_num_seqs=1"], f"{RO}.max_num_seqs", "max_response_length"),
        ("", [], None, "lora_rank"),
    ],
)  # fmt: skip
def test_each_phase_has_a_key_that_makes_it_smaller(phase, keys, key, fix) -> None:
    rows = "micro_batch_size" in str(keys)
    switched = [f"{A}.use_dynamic_bsz=False", f"{RO}.log_prob_use_dynamic_bsz=False"] if rows else []
    found = less(load([*SMALL, *switched, *keys]).config, phase)
    assert found[0] == key and fix in found[1]


def test_every_phase_that_computes_is_known() -> None:
    computing = {name for name, phase in PHASES.items() if phase.cut or phase.generates}
    assert computing == {*CUTS, "gen", "gen_max", "testing"}


def test_an_error_knows_the_innermost_phase_that_it_ended() -> None:
    timer = Timer()
    with pytest.raises(ZeroDivisionError) as caught, timer("step"), timer("gen"):
        _ = 1 / 0
    assert vars(caught.value) == {PHASE: "gen"}


def test_a_rollout_without_memory_keeps_the_steps_before_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Collector, "drawn_by", failing(Collector.drawn_by, 1))
    with pytest.raises(
        UserError, match=r"phase `gen` \(generation\): CUDA out of memory\. Tried to allocate 20\.00 GiB"
    ) as caught:
        train(load([*SMALL, f"trainer.default_local_dir={tmp_path}"]).config)
    assert caught.value.key == f"{RO}.max_num_seqs" and "12.31 GiB is free." in caught.value.reason
    assert "Including" not in caught.value.reason and "max_num_seqs=16; `paddock plan`" in str(caught.value.fix)
    assert (tmp_path / "global_step_1").is_dir()
    monkeypatch.undo()
    assert train(load([*SMALL, f"trainer.default_local_dir={tmp_path}"]).config).trained == 2


def test_an_update_without_memory_ends_with_exit_code_2_and_no_traceback(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Policy, "learn", failing(Policy.learn, 1))
    keys = [*SMALL, "trainer.save_freq=1", f"{A}.ppo_max_token_len_per_gpu=4096"]
    assert main(["train", *keys, f"trainer.default_local_dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert (
        f"{A}.ppo_max_token_len_per_gpu=4096: the device ran out of memory in the phase `update_actor` (policy update)"
        in said
    )
    assert f"fix: {A}.ppo_max_token_len_per_gpu=2048" in said and "Traceback" not in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1]


def test_an_evaluation_without_memory_says_so(monkeypatch) -> None:
    monkeypatch.setattr(Collector, "drawn_by", failing(Collector.drawn_by, 0))
    with ExitStack() as things, pytest.raises(UserError, match="phase `testing` \\(validation"):
        evaluate(Assembly(load(SMALL).config, things))


def test_a_processor_without_memory_names_the_phase_and_a_key(tmp_path):
    """Real: the data segment of the process is limited, and malloc fails within a step."""
    command = [sys.executable, "-m", "paddock.cli", "train", *SMALL, "data.train_batch_size=512", f"{RO}.n=32",
               f"{A}.ppo_mini_batch_size=512", f"trainer.default_local_dir={tmp_path}"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    limited = f"ulimit -d 420000; exec {shlex.join(command)}"
    done = subprocess.run(["bash", "-c", limited], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "the device ran out of memory in the phase" in done.stderr and "\n  fix: " in done.stderr
