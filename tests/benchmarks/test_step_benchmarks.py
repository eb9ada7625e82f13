"""The scripts that measure a step run, on the smallest of models; what they measure is for a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    "arguments,rows",
    [
        (["gpu_step.py", "--shape", "smallest", "--parts", "rollout,step,training", "--device", "cpu"], 3),
        pytest.param(["cpu_step.py", "--case", "smallest"], 3, marks=pytest.mark.slow),
        pytest.param(["lora.py", "--shape", "smallest", "--device", "cpu", "--rank", "4"], 3, marks=pytest.mark.slow),
        pytest.param(
            ["offload.py", "--shape", "smallest", "--device", "cpu", "--tokens", "64"], 5, marks=pytest.mark.slow
        ),
    ],
    ids=["gpu_step", "cpu_step", "lora", "offload"],
)
def test_the_script_prints_its_table(arguments, rows):
    script, *rest = arguments
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *rest, "--steps", "1", "--warmup", "1"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == rows, done.stdout
    assert "nan" not in done.stdout
