"""Killed at any moment, a run that is started again ends as the untouched one. `make test-chaos`: hundreds of kills."""

from __future__ import annotations

import importlib.util
import random
import sys

from conftest import ROOT


def load_kills():
    spec = importlib.util.spec_from_file_location("kills", ROOT / "tests" / "chaos" / "kills.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kills"] = module
    spec.loader.exec_module(module)
    return module


kills = load_kills()


def test_a_run_that_was_killed_three_times_equals_the_untouched_one(tmp_path):
    dice = random.Random(11366)  # half a line of samples, run.json, a checkpoint without its manifest
    died = kills.Chaos(tmp_path, dice).trial("grpo", "killed", kills=3)
    assert died.total() == 3 and len(died) > 1


def test_the_comparison_sees_what_it_must(tmp_path):
    """One bit of a tensor, one number of the ledger, one file: each is a difference."""
    import json

    import torch
    from safetensors.torch import save_file

    for name in ("one", "other"):
        folder = tmp_path / name / "global_step_1"
        folder.mkdir(parents=True)
        save_file({"w": torch.arange(8.0)}, folder / "model.safetensors")
        torch.save({"state": [torch.ones(3), 1]}, folder / "optimizer.pt")
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5, "timing_s/gen": 1.0}) + "\n")
    assert list(kills.compare(tmp_path / "one", tmp_path / "other")) == []
    other = tmp_path / "other"
    save_file({"w": torch.arange(8.0).nextafter(torch.tensor(9.0))}, other / "global_step_1" / "model.safetensors")
    torch.save({"state": [torch.ones(3), 2]}, other / "global_step_1" / "optimizer.pt")
    (other / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.6, "timing_s/gen": 2.0}) + "\n")
    assert len(list(kills.compare(tmp_path / "one", other))) == 3
    (other / ".global_step_2.writing").mkdir()
    assert list(kills.compare(tmp_path / "one", other)) == ["files: ['.global_step_2.writing']"]
