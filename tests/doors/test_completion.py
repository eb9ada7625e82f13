"""`paddock completion`: what real shells offer when TAB is pressed."""

from __future__ import annotations

import os
import pty
import resource
import select
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from paddock.cli import COMMANDS, main
from paddock.help.completion import words

SECONDS = 60.0  # a busy machine is slow to answer
FAST = 0.150  # seconds of a processor


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with some files, and `paddock` on PATH."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "paddock"
    program.write_text(
        '#!/bin/sh\n[ "$1" = train ] && echo "<$*>" && exit\n'  # a line that was completed is shown, and not run
        f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m paddock.cli "$@"\n'
    )
    program.chmod(0o755)
    work = tmp_path / "work"
    (work / "runs").mkdir(parents=True)
    (work / "rows.jsonl").write_text("")
    (work / "two words.jsonl").write_text("")
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(work)
    return work


def offered(line: str) -> list[str]:
    return words(line.split(" ")[1:])


def test_the_first_word_is_a_command():
    assert offered("paddock ") == [*COMMANDS, "--help", "--version"]
    assert offered("paddock pl") == ["plan"]


def test_keys_are_offered_one_section_at_a_time_and_with_their_sign():
    assert offered("paddock train actor_rollout_ref.ro") == ["actor_rollout_ref.rollout."]
    assert offered("paddock train +trainer.total_") == ["+trainer.total_epochs=", "+trainer.total_training_steps="]
    assert {"data.", "trainer.", "critic."} <= set(offered("paddock plan "))


def test_a_command_offers_the_keys_that_it_reads_under_its_short_names_too():
    assert "optim.lr=" in offered("paddock sft optim.l") and "model=" in offered("paddock rm train mod")
    assert offered("paddock sft critic.") == []
    assert offered("paddock generate pro") == ["prompt="]
    assert offered("paddock eval rollout.val_kwargs.do_sample=") == [
        f"rollout.val_kwargs.do_sample={value}" for value in ("True", "False")
    ]


def test_values_are_the_choices_of_a_key_and_paths_are_files(place):
    assert offered("paddock train data.truncation=") == [
        f"data.truncation={value}" for value in ("error", "left", "right", "middle")
    ]
    assert "algorithm.adv_estimator=grpo" in offered("paddock train algorithm.adv_estimator=gr")
    assert offered("paddock train data.train_files=r") == ["data.train_files=rows.jsonl", "data.train_files=runs/"]
    assert offered("paddock sft data=ro") == ["data=rows.jsonl"]
    assert offered("paddock train trainer.seed=") == []


def test_other_commands_offer_their_own_words(place):
    assert "gsm8k" in offered("paddock data gs") and offered("paddock models g") == ["get"]
    assert offered("paddock models get smol") == ["smollm2-135m-instruct"]
    assert offered("paddock export ru") == ["runs/"] and offered("paddock eval ru") == ["runs/"]
    assert offered("paddock doctor e") == ["env"] and offered("paddock completion f") == ["fish"]
    assert offered("paddock plan --r") == ["--rows"] and offered("paddock keys trainer.log") == [
        "trainer.logger", "trainer.log_val_generations"
    ]  # fmt: skip


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "paddock completion tcsh: which shell?\n  fix: one of: bash, zsh, fish" in capsys.readouterr().err


def test_words_come_at_once_and_without_schema_or_torch(place):
    code = (
        "import sys; from paddock.cli import main; main(['completion', '--words', 'train', 'data.']); "
        "print([name for name in ('torch', 'omegaconf', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.splitlines()[-1] == "[]" and "data.train_files=" in done.stdout
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(["paddock", "completion", "--words", "train", "data."], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < FAST


class Terminal:
    """A shell behind a pseudo-terminal, to which keys are typed."""

    def __init__(self, command: list[str], **environment: str):
        self.pid, self.screen = pty.fork()
        if not self.pid:
            os.execvpe(command[0], command, {**os.environ, "TERM": "dumb", "PS1": "$ ", **environment})
        self.said = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.screen)
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def expect(self, text: str) -> None:
        """Waits until the text is on the screen, and forgets all up to it."""
        end = time.monotonic() + SECONDS
        while text not in self.said:
            assert time.monotonic() < end, f"{text!r} is not in {self.said!r}"
            if select.select([self.screen], [], [], 0.2)[0]:
                self.said += os.read(self.screen, 65536).decode(errors="replace")
        self.said = self.said.partition(text)[2]


def press_tab(shell: Terminal, setup: str) -> None:
    """Four words completed by TAB, then the line as the shell hands it to the program."""
    shell.type(f"{setup}; echo ready-$((40 + 2))\n")
    shell.expect("ready-42")
    for typed, completed in (("paddock trai\t", "train "), ("algorithm.adv_e\t", "stimator="), ("rlo\t", "o "),
                             ("data.train_files=tw\t", "o\\ words.jsonl ")):  # fmt: skip
        shell.type(typed)
        shell.expect(completed)
    shell.type("\n")
    shell.expect("<train algorithm.adv_estimator=rloo data.train_files=two words.jsonl>")


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_a_line(place):
    with Terminal(["bash", "--norc", "--noprofile", "-i"]) as shell:
        press_tab(shell, 'eval "$(paddock completion bash)"')


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_completes_a_line(place):
    with Terminal(["zsh", "-f", "-i"]) as shell:
        press_tab(shell, 'autoload -U compinit && compinit -u -D; eval "$(paddock completion zsh)"')


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes_a_line(place):
    script = "paddock completion fish | source\n" + "\n".join(
        f"complete -C '{line}'"
        for line in ("paddock trai", "paddock train data.trunc", "paddock train data.truncation=l", "paddock export ru")
    )
    done = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["train", "data.truncation=", "data.truncation=left", "runs/"]
