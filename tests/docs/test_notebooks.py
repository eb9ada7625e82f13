"""Notebooks run from their first cell to their last, in a kernel; a run in a cell has a bar and stops at Ctrl-C; type
checkers find nothing in notebooks or in examples."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import ROOT
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PROGRAMS = [ROOT / "examples" / "best_of_n.py", ROOT / "examples" / "trl" / "grpo_paddock.py"]
SECONDS = 120  # for a cell
STOPPED = """
import os, signal
import paddock
rows = [{{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b)}} for a in range(4) for b in range(4)]
run = paddock.Run(data=rows, reward=lambda completion, answer: float(answer in completion), n=4, batch=4, steps=2,
                  logger=["console"], folder={folder!r})
run.listeners = (lambda step: os.kill(os.getpid(), signal.SIGINT), None, None)
print(run.train().checkpoint.step)
run.close()
run.listeners = (None, None, None)
"""
GOES_ON = "outcome = run.train(); run.close(); print(outcome.finished)"


def opened(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code(notebook: Any) -> str:
    """The cells as one program. A bare expression at the end of a cell is what a notebook shows: it stays."""
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code") + "\n"


def printed(notebook: Any, containing: str) -> str:
    """What the cell with this text wrote or showed."""
    (cell,) = (c for c in notebook.cells if c.cell_type == "code" and containing in c.source)
    shown = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    return "".join(shown)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder in which the kernel works."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def executed(folder):
    """Runs notebooks in one kernel, which forgets between two of them: most of a notebook's time is `import torch`."""
    kernel = KernelManager()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython"), "HF_HOME": str(folder)}
    kernel.start_kernel(cwd=str(folder), env=environment)

    def execute(notebook: Any) -> Any:
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        return NotebookClient(notebook, km=kernel, timeout=SECONDS).execute()

    yield execute
    kernel.shutdown_kernel(now=True)


def test_there_are_three_notebooks_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "inside_a_step", "own_reward_and_data"]
    for path in NOTEBOOKS:
        notebook = opened(path)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_the_first_run_learns_and_leaves_a_report_and_a_model(executed, folder):
    notebook = executed(opened(FOLDER / "first_run.ipynb"))
    change = printed(notebook, "after = run.evaluate")
    name, before, after = change.splitlines()[0].replace(" -> ", ": ").split(": ")
    assert name == "val-core/data/reward/mean@1" and float(after) > float(before)
    report, model = printed(notebook, "run.report()").split()
    assert (folder / report).is_file() and (folder / model / "model.safetensors").is_file()


def test_own_rewards_and_data_train_and_a_missing_column_is_named(executed):
    notebook = executed(opened(FOLDER / "own_reward_and_data.ipynb"))
    parts = ast.literal_eval(printed(notebook, 'startswith("reward/")'))
    means = [parts[f"reward/{name}/mean"] for name in ("correct", "compute_score", "right_length")]
    assert parts["reward/score/mean"] == pytest.approx(means[0] + 0.5 * means[1] + 0.1 * means[2], abs=1e-5)
    assert "'solution_text'" in printed(notebook, "def wrong") and "digits" in printed(notebook, "def wrong")


def test_inside_a_step_advantages_are_those_by_hand_and_ratios_follow_them(executed):
    notebook = executed(opened(FOLDER / "inside_a_step.ipynb"))
    assert float(printed(notebook, "by_hand =")) < 1e-4
    better, worse = (float(line.split()[-1]) for line in printed(notebook, '("better"').splitlines())
    assert better > 1 > worse


def test_ctrl_c_leaves_a_checkpoint_and_the_same_line_goes_on_with_one_bar_that_moves(executed, tmp_path):
    cells = [nbformat.v4.new_code_cell(cell) for cell in (STOPPED.format(folder=str(tmp_path)), GOES_ON)]
    *_, stopped, went_on = executed(nbformat.v4.new_notebook(cells=cells)).cells
    first, second = ("".join(out.text for out in cell.outputs if out.get("name") == "stdout")
                     for cell in (stopped, went_on))  # fmt: skip
    assert first == "1\n" and second == "True\n"
    bars = [output.data["text/html"] for output in went_on.outputs if output.output_type == "display_data"]
    assert len(bars) == 1 and 'value="2" max="2"' in bars[0] and "Reward" in bars[0]


def test_mypy_finds_nothing_in_notebooks_and_examples(tmp_path):
    files = []
    for path in NOTEBOOKS:
        files.append(tmp_path / f"notebook_{path.stem}.py")
        files[-1].write_text(code(opened(path)))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, files + PROGRAMS)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
