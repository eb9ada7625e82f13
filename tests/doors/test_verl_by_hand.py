"""`python3 -m verl.trainer.main_ppo` typed by hand starts Paddock where an engineer has asked for it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from conftest import ROOT

from paddock.errors import UserError
from paddock.verl.scripts.by_hand import run


class Environment:
    """A Python environment in which Paddock is installed: its packages are this one's."""

    def __init__(self, folder: Path):
        venv.create(folder / "env", symlinks=True)
        self.python = folder / "env" / "bin" / "python"
        self.packages = next((folder / "env" / "lib").glob("python*/site-packages"))
        (self.packages / "installed.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
        self.work = folder / "work"
        self.work.mkdir()

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.python), *words]
        return subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def installed(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def test_the_name_is_given_and_taken_away(installed):
    before = installed("-m", "paddock.cli", "verl")
    assert before.returncode == 0 and "verl: no such package here; `paddock verl on`" in before.stdout
    on = installed("-m", "paddock.cli", "verl", "on")
    assert (on.returncode, on.stdout) == (0, f"verl: Paddock, {ROOT}/compat/verl/__init__.py\n"), on.stderr
    refused = installed("-m", "verl.trainer.main_ppo", "trainer.nonsense=1")
    assert refused.returncode == 2 and refused.stderr.startswith("paddock: trainer.nonsense=1: no such key")
    off = installed("-m", "paddock.cli", "verl", "off")
    assert off.returncode == 0 and "no such package" in off.stdout
    assert "No module named 'verl'" in installed("-c", "import verl").stderr


def test_it_yields_where_verl_itself_is_installed_or_lies_in_the_working_folder(installed):
    assert installed("-m", "paddock.cli", "verl", "on").returncode == 0
    real = "print('verl itself')\n"
    (installed.work / "verl").mkdir()
    (installed.work / "verl" / "__init__.py").write_text(real)
    assert installed("-c", "import verl").stdout == "verl itself\n"
    (installed.work / "verl").rename(installed.packages / "verl")
    assert installed("-c", "import verl").stdout == "verl itself\n"
    assert "verl: verl itself, " in installed("-m", "paddock.cli", "verl").stdout
    (installed.packages / "verl-0.9.0.dist-info").mkdir()
    (installed.packages / "verl-0.9.0.dist-info" / "METADATA").write_text("Name: verl\nVersion: 0.9.0\n")
    refused = installed("-m", "paddock.cli", "verl", "on")
    assert (
        refused.returncode == 2 and "verl 0.9.0 is installed in this environment, and keeps its name" in refused.stderr
    )


def test_words_that_it_does_not_know_are_refused():
    with pytest.raises(UserError) as error:
        run(["maybe"])
    assert error.value.fix == "paddock verl on|off|status"
