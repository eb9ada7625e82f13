"""A program that never calls `close` ends as quietly as one that does."""

from __future__ import annotations

import os
import subprocess
import sys

from conftest import ROOT

PROGRAM = """
import paddock

run = paddock.Run(n=2, batch=2, steps=1, validate_first=False, logger=["file"], config={"trainer.test_freq": -1})
print(next(iter(run)).number)
"""


def test_a_run_that_is_open_at_the_end_of_the_program_is_closed_without_a_traceback(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
