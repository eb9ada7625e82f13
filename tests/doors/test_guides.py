"""What README and guides tell a reader to type works, and what they say of keys is so."""

from __future__ import annotations

import re
import shlex

import pytest
from conftest import ROOT
from pages import LANGUAGES, READMES, arguments_of, blocks, typed

from paddock.cli import main
from paddock.commands.guard import guarded
from paddock.commands.keys_of import EVAL, GENERATE, SFT
from paddock.config import tree
from paddock.data.prepare.command import PREPARERS
from paddock.loading.load import load
from paddock.models.get import CATALOGUE

GUIDES = {"gae": "ppo.md", "grpo": "grpo.md", "rloo": "rloo.md"}
"""Estimator and its guide."""
PAGES = [READMES[0], *(ROOT / "docs" / LANGUAGES[0] / name for name in GUIDES.values())]
"""In one language: the other one holds the same commands."""
ROWS = "7473"  # of GSM8K, for plans whose files are not here
LOADERS = {"eval": EVAL, "generate": GENERATE, "sft": SFT}
"""Commands that need a model and data: their keys are read, nothing else."""


TYPED = [*{command.words: command for page in PAGES for command in typed(page)}.values()]


def check(words: tuple[str, ...]) -> int:
    """0 if the command can be typed as it stands. Training becomes a plan: the same keys, no weights."""
    arguments = arguments_of(words)
    if arguments is None:
        return other_program(words)
    command, rest = arguments[0], arguments[1:]
    if command in ("train", "plan"):
        return main(["plan", *rest, *([] if "--rows" in rest else ["--rows", ROWS])])
    if command == "data":
        return int(rest[0] not in PREPARERS)
    if command == "models":
        return int(rest[0] != "list" and rest[1] not in CATALOGUE)
    if command == "run":
        return main(["run", *(["--plan"] if "--plan" not in rest else []), *rest])
    if command == "verl":
        return int(rest not in (["on"], ["off"], ["status"]))
    if command in LOADERS:
        return guarded(lambda keys: len(LOADERS[command].load(keys).warnings), rest)
    return int(command != "export" or len(rest) != 2)


def other_program(words: tuple[str, ...]) -> int:
    """`make TARGET`, a script of the project, or a step of setting up."""
    program, *rest = words
    if program == "make":
        return int(not re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M))
    if program in ("bash", "python", "python3"):
        return int(not (ROOT / rest[0]).is_file())
    return int(program not in ("git", "cd", "source", "pip"))


@pytest.mark.parametrize("command", TYPED, ids=str)
def test_a_command_of_readme_and_guides_can_be_typed(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = command.words
    for name, content in command.files:
        (tmp_path / name).write_text(content)
        words = tuple(word.replace(f"={name}", f"={tmp_path / name}") for word in words)
    assert check(words) == 0, capsys.readouterr().err


def test_the_check_finds_what_cannot_be_typed(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    wrong = [
        *("paddock train algorithm.adv_estimator=rlo", "python3 -m paddock.trainer.main_ppo data.train_bath_size=4"),
        *("paddock eval rollout.nn=4", "paddock data gsm9k", "make quickstat", "bash examples/nowhere.sh", "rm -r x"),
    ]
    assert [check(tuple(shlex.split(line))) for line in wrong] == [2, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_what_a_readme_shows_of_a_misspelt_key_is_what_is_said(page, capsys):
    shown = [block for block in blocks(page, "") if block.startswith("$ paddock")]
    assert shown
    for block in shown:
        line, *answer = block.splitlines()
        assert main(shlex.split(line)[2:]) == 2
        assert capsys.readouterr().err.splitlines() == answer


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("estimator", GUIDES)
def test_the_defaults_in_a_guide_are_the_defaults(estimator, language):
    """Of a run on a node of GPUs; the embedded default differs, and the guides say so."""
    config = load([f"algorithm.adv_estimator={estimator}", "trainer.n_gpus_per_node=8"]).config
    rows = re.findall(
        r"^\| `([@\w.]+)` \| ([^|]+) \|", (ROOT / "docs" / language / GUIDES[estimator]).read_text(), re.M
    )
    keys = {key.replace("@", "actor_rollout_ref."): default.strip() for key, default in rows}
    keys.pop("algorithm.adv_estimator")
    assert len(keys) > 20
    known = tree.leaves()
    for key, default in keys.items():
        assert key in known, key
        value = tree.get(config, key)
        if key == "critic.model.path":
            assert value == config.actor_rollout_ref.model.path
        else:
            assert default == ("null" if value is None else str(value)), key
