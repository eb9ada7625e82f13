"""The guides of environments and tools: their programs run, and both languages hold the same."""

from __future__ import annotations

import contextlib
import io

import pytest
from conftest import ROOT
from pages import LANGUAGES, blocks

PAGES = ("environments", "tools")


@pytest.mark.parametrize("name", PAGES)
def test_both_languages_hold_the_same_programs(name):
    english, chinese = (blocks(ROOT / "docs" / language / f"{name}.md", "python") for language in LANGUAGES)
    assert english == chinese and english


@pytest.mark.parametrize("name", PAGES)
def test_the_programs_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks(ROOT / "docs/en" / f"{name}.md", "python"):
            exec(compile(block, name, "exec"), {"__name__": "__main__"})
    if name == "environments":
        assert "'role': 'assistant'" in printed.getvalue()
