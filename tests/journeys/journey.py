"""What a user does at a terminal: types a command in a folder, reads what it prints.

Commands run in this process, by the function of the console script, so that torch is imported once for all journeys;
`in_own_process` is for what a shell starts.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from paddock.cli import main
from paddock.commands.guard import Messages
from paddock.facts.machine import cache_folder


def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of a user who has no models; compiled kernels stay in the cache where it holds none."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    if cache_folder("models").exists():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def typed(command: str, folder: Path, code: int = 0) -> tuple[str, str]:
    """Runs a command line in the folder; returns what it printed and what it logged."""
    program, *words = shlex.split(command)
    assert program == "paddock", command
    printed, logged, handler, root = io.StringIO(), io.StringIO(), Messages(), logging.getLogger()
    root.addHandler(handler)  # pytest has handlers of its own there, so that the command adds none
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(logged):
            ended = main(words)
    finally:
        root.removeHandler(handler)
    assert ended == code, f"{command}\n{printed.getvalue()}{logged.getvalue()}"
    return printed.getvalue(), logged.getvalue()


def in_own_process(command: str, folder: Path, code: int = 0) -> tuple[str, str]:
    """The same in a process of its own, as a shell starts it."""
    program, *words = shlex.split(command)
    assert program == "paddock", command
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "paddock.cli", *words], cwd=folder, env=environment,
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout, done.stderr


def metrics(run: Path) -> list[dict]:
    """The steps that a run has logged."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
