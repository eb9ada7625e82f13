"""The scripts that measure a step run, on the smallest of models; what they measure is for a quiet machine."""

from __future__ import annotations

import runpy
import sys

import pytest
from conftest import ROOT

from tests.forked import ForkedCall

ONE_MEASUREMENT = {"gap.py", "passes.py", "products.py"}
"""Scripts that train no number of steps."""
GAP = ["--model", "builtin:tiny", "--data", "builtin:addition/train", "--prompts", "2", "--device", "cpu"]


@pytest.mark.parametrize(
    "arguments,rows",
    [
        (["gpu_step.py", "--shape", "smallest", "--parts", "rollout,step,training", "--device", "cpu"], 3),
        (["speed_table.py", "smallest/*/full", "--device", "cpu"], 4),
        (["products.py", "--shape", "smallest", "--device", "cpu", "--turns", "1"], 9),
        pytest.param(["gap.py", *GAP], 4, marks=pytest.mark.slow),
        (["passes.py", "--shape", "smallest", "--device", "cpu", "--turns", "1", "--tokens", "300"], 10),
        pytest.param(
            ["speed_table.py", "smallest/*/[lm]*", "--device", "cpu", "--rank", "4"], 6, marks=pytest.mark.slow
        ),
        pytest.param(["cpu_step.py", "--case", "smallest"], 3, marks=pytest.mark.slow),
        pytest.param(["lora.py", "--shape", "smallest", "--device", "cpu", "--rank", "4"], 3, marks=pytest.mark.slow),
        pytest.param(
            ["offload.py", "--shape", "smallest", "--device", "cpu", "--tokens", "64"], 5, marks=pytest.mark.slow
        ),
    ],
    ids=["gpu_step", "speed_table", "products", "gap", "passes", "speed_table_lora", "cpu_step", "lora", "offload"],
)
def test_the_script_prints_its_table(arguments, rows):
    script, *rest = arguments

    def run() -> None:
        sys.argv = [script, *rest, *([] if script in ONE_MEASUREMENT else ["--steps", "1", "--warmup", "1"])]
        sys.path.insert(0, str(ROOT / "benchmarks"))
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")

    process = ForkedCall(run, folder=ROOT)
    code, said = process.wait(600), process.said()
    assert code == 0, said[-2000:]
    table = [line for line in said.splitlines() if line.startswith("|")]
    assert len(table) == rows, said
    assert "nan" not in said
