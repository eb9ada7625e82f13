"""A run in a notebook: its cell has a bar that moves, and Ctrl-C leaves a checkpoint."""

from __future__ import annotations

import nbclient
import nbformat
from conftest import ROOT

CELL = """
import sys; sys.path.insert(0, {root!r})
import paddock
rows = [{{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b)}} for a in range(4) for b in range(4)]
run = paddock.Run(data=rows, reward=lambda completion, answer: float(answer in completion), n=4, batch=4, steps=2,
                  logger=["console"], folder={folder!r})
"""
TRAIN = "outcome = run.train(); run.close(); print(outcome.finished)"
INTERRUPTED = """
import os, signal
run.listeners = (lambda step: os.kill(os.getpid(), signal.SIGINT), None, None)
print(run.train().checkpoint.step)
"""
CLOSED = "run.close(); run.listeners = (None, None, None)"


def executed(*cells: str) -> list:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=120).execute()
    return [cell.outputs for cell in book.cells]


def printed(outputs: list) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_ctrl_c_leaves_a_checkpoint_and_the_same_line_goes_on_with_one_bar_that_moves(tmp_path):
    made = CELL.format(root=str(ROOT), folder=str(tmp_path))
    _, stopped, _, went_on = executed(made, INTERRUPTED, CLOSED, TRAIN)
    assert printed(stopped) == "1\n" and printed(went_on) == "True\n"
    bars = [output.data["text/html"] for output in went_on if output.output_type == "display_data"]
    assert len(bars) == 1 and 'value="2" max="2"' in bars[0] and "Reward" in bars[0]
