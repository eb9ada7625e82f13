"""Notebooks run from their first cell to their last, in a kernel; type checkers find nothing in them or in examples."""

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
def executed(tmp_path_factory):
    """Runs notebooks in one kernel, which forgets between two of them: most of a notebook's time is `import torch`."""
    folder = tmp_path_factory.mktemp("notebooks")
    kernel = KernelManager()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython"), "HF_HOME": str(folder)}
    kernel.start_kernel(cwd=str(folder), env=environment)

    def execute(name: str) -> tuple[Any, Path]:
        notebook = opened(FOLDER / f"{name}.ipynb")
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        return NotebookClient(notebook, km=kernel, timeout=SECONDS).execute(), folder

    yield execute
    kernel.shutdown_kernel(now=True)


def test_there_are_three_notebooks_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "inside_a_step", "own_reward_and_data"]
    for path in NOTEBOOKS:
        notebook = opened(path)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_the_first_run_learns_and_leaves_a_report_and_a_model(executed):
    notebook, folder = executed("first_run")
    change = printed(notebook, "after = run.evaluate")
    name, before, after = change.splitlines()[0].replace(" -> ", ": ").split(": ")
    assert name == "val-core/data/reward/mean@1" and float(after) > float(before)
    report, model = printed(notebook, "run.report()").split()
    assert (folder / report).is_file() and (folder / model / "model.safetensors").is_file()


def test_own_rewards_and_data_train_and_a_missing_column_is_named(executed):
    notebook, _ = executed("own_reward_and_data")
    parts = ast.literal_eval(printed(notebook, 'startswith("reward/")'))
    means = [parts[f"reward/{name}/mean"] for name in ("correct", "compute_score", "right_length")]
    assert parts["reward/score/mean"] == pytest.approx(means[0] + 0.5 * means[1] + 0.1 * means[2], abs=1e-5)
    assert "'solution_text'" in printed(notebook, "def wrong") and "digits" in printed(notebook, "def wrong")


def test_inside_a_step_advantages_are_those_by_hand_and_ratios_follow_them(executed):
    notebook, _ = executed("inside_a_step")
    assert float(printed(notebook, "by_hand =")) < 1e-4
    better, worse = (float(line.split()[-1]) for line in printed(notebook, '("better"').splitlines())
    assert better > 1 > worse


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
