"""Every command has a page of its own, whose keys exist and whose examples work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from runpy import run_module

import pytest
from conftest import ROOT

import paddock
from paddock.cli import COMMANDS, main, usage
from paddock.commands.run_model import with_run
from paddock.config import tree
from paddock.help.entry import COMMANDS as TAKING_KEYS
from paddock.help.entry import entries, takes
from paddock.help.pages import PAGES
from paddock.loading.load import load

EXAMPLES = [(name, line) for name, page in PAGES.items() if name in COMMANDS for _, line in page.examples]


def shown(capsys, *arguments: str) -> str:
    try:
        assert main([*arguments]) == 0
    except SystemExit as end:  # argparse
        assert end.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does_and_shows_examples(name, capsys):
    text = shown(capsys, name, "--help")
    assert PAGES[name].about.splitlines()[0] in text and "Examples:\n  # " in text and "usage: paddock " in text
    assert shown(capsys, "help", name) == text


def test_python_m_paddock_is_the_command():
    said = [
        subprocess.run([sys.executable, "-m", "paddock", *words], capture_output=True, text=True, timeout=60)
        for words in (["--version"], ["nosuch"])
    ]
    assert [one.returncode for one in said] == [0, 2]
    assert said[0].stdout == f"paddock {paddock.__version__}\n" and "no such command" in said[1].stderr


def test_the_first_help_stays_short_and_names_every_command():
    assert len(usage().splitlines()) < 40
    assert all(f"\n  paddock {name} " in usage() for name in COMMANDS)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if page.keys])
def test_keys_of_a_page_are_read_by_the_command_and_shown_with_default_and_meaning(name, capsys):
    spoken = "rm train" if name == "rm" else name
    command = TAKING_KEYS[spoken]
    for key in PAGES[name].keys:
        assert key in tree.leaves()
        assert command is None or takes(command, key), f"{name} does not read {key}"
    text = " ".join(shown(capsys, name, "--help").split())
    for key in PAGES[name].keys[:8]:
        assert entries()[key].meaning.split(";")[0] in text


def test_a_page_shows_the_default_of_its_command_and_its_short_names(capsys):
    text = shown(capsys, "sft", "--help")
    assert re.search(r"optim\.lr +1e-05 +peak learning rate", text)
    assert "model = actor_rollout_ref.model.path" in text


def test_all_lists_every_key_that_a_command_reads(capsys):
    text = shown(capsys, "rm", "train", "--help", "--all")
    assert "optim.weight_decay" in text and "trainer.max_nonfinite_steps" in text and "critic." not in text
    assert "more keys" not in text


def test_help_of_a_script_or_of_one_data_set_is_left_to_them(capsys):
    assert "--local_save_dir" in shown(capsys, "data", "gsm8k", "--help")
    assert main(["run", "nowhere.sh", "--help"]) == 2
    assert "paddock run nowhere.sh: no such" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if page.parses and name != "data"])
def test_flags_that_completion_offers_are_those_of_the_parser(name, capsys):
    flags = set(
        re.findall(r"(?<![\w-])--[a-z-]+", shown(capsys, name, *(["get"] if name == "models" else []), "--help"))
    )
    assert {word for word, _ in PAGES[name].words} == flags - {"--help"}


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_an_example_is_understood(name, line, tmp_path, monkeypatch):
    """Its settings are keys that the command reads."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    if words[:1] != ["paddock"]:
        return  # a line for the shell
    assert words[1] in COMMANDS
    command = TAKING_KEYS.get("rm train" if words[1] == "rm" else words[1])
    settings = [word for word in words[2:] if "=" in word and not word.startswith(("-", "prompt=", "output="))]
    if command is not None:
        warnings = command.load(with_run(command, settings)).warnings
        assert [warning for warning in warnings if "no effect" in warning] == []
    elif settings:
        load(settings)


@pytest.mark.slow
def test_all_examples_work_when_they_are_pasted_one_after_the_other(tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "paddock"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m paddock.cli "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for _, line in EXAMPLES:
        shell = "fish" if line.endswith("source") else "zsh" if "completion zsh" in line else "bash"
        if not shutil.which(shell):
            continue
        before = "autoload -U compinit && compinit -u -D; " if shell == "zsh" else ""
        done = subprocess.run(
            [shell, "-c", before + line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


MODULES = {f"paddock.commands.{name}": name for name in ("train", "sft", "rm", "generate")}


@pytest.mark.parametrize("module", [*MODULES, "paddock.trainer.main_ppo"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_a_module_that_is_run_in_place_of_the_command_has_the_same_help(module, flag, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{module}.py", flag])
    with pytest.raises(SystemExit) as ended:
        run_module(module, run_name="__main__")
    command = MODULES.get(module, "train")
    assert not ended.value.code and capsys.readouterr().out == shown(capsys, command, "--help")
