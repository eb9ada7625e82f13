"""The guides of environments and tools: their programs run, their commands are typed, and both languages agree."""

from __future__ import annotations

import contextlib
import io
import json
import shutil

import pytest
from conftest import ROOT
from pages import LANGUAGES, arguments_of, blocks, typed

from paddock.cli import main
from paddock.environments.calls import FORMATS, format_of

PAGES = ("environments", "tools")
FIRST = ROOT / "examples" / "environments" / "first_agent.py"
SMALL = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
         "trainer.total_training_steps=1", "data.val_max_samples=4", "trainer.save_last=False")  # fmt: skip
TYPED = [command.words for name in PAGES for command in typed(ROOT / "docs/en" / f"{name}.md")]
HERE = [words for words in TYPED if any("builtin:" in word or FIRST.name in word for word in words)]
"""Commands that need no file of the reader's, no package and no model of the hub."""


@pytest.mark.parametrize("name", PAGES)
def test_the_programs_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks(ROOT / "docs/en" / f"{name}.md", "python"):
            exec(compile(block.replace("steps=10", "steps=1"), name, "exec"), {"__name__": "__main__"})
    assert "'role': 'assistant'" in printed.getvalue()


def test_the_first_agent_is_the_example():
    assert blocks(ROOT / "docs/en/environments.md", "python")[0] == FIRST.read_text()


def test_the_schema_that_is_shown_is_what_the_program_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks(ROOT / "docs/en/tools.md", "python")[0], {"__name__": "__main__"})
    shown = blocks(ROOT / "docs/en/tools.md", "json")[0]
    assert json.loads(shown) == json.loads(printed.getvalue().replace("'", '"'))


@pytest.mark.parametrize("words", HERE, ids=" ".join)
def test_a_command_works_as_it_is_typed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIRST, tmp_path)
    arguments = arguments_of(words)
    assert main([*arguments, *(SMALL if arguments[0] == "train" else [])]) == 0


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_table_of_formats_names_all_of_them_and_its_calls_are_read(language):
    text = (ROOT / "docs" / language / "tools.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.removeprefix("| `").partition("`")[0] in FORMATS]
    assert {row[0].strip("| `") for row in rows} == set(FORMATS)
    for name, _, shown in rows:
        if name.strip("| `") not in ("deepseek_v3", "deepseek_v4", "command_r"):  # told of in words
            for call in shown.replace("\\|", "|").strip(" |`").replace("`、`", "`, `").split("`, `"):
                found, malformed = format_of(name.strip("| `"), None).parse(call)
                assert found and not malformed and found[0].name == "add" and found[0].arguments["a"] in (2, "2"), call
