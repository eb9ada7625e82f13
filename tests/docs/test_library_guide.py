"""The Python guide: its blocks run from top to bottom, its table of keywords is the library's, both languages agree."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
from conftest import ROOT
from pages import LANGUAGES, blocks

from paddock.library.keywords import KEYS

GUIDES = [ROOT / "docs" / language / "library.md" for language in LANGUAGES]
FROM_TRL = [ROOT / "docs" / language / "from_trl.md" for language in LANGUAGES]


@pytest.mark.parametrize("page", GUIDES, ids=LANGUAGES)
def test_the_table_of_keywords_is_the_librarys(page):
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|$", page.read_text(), re.M)
    assert rows == [*KEYS.items()]


def test_the_blocks_of_the_guide_run_in_order(tmp_path, monkeypatch, catalogues):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, block in enumerate(blocks(GUIDES[0], "python")):
            exec(compile(block, f"block {number}", "exec"), names)
    text = printed.getvalue()
    assert "did you mean 'batch'?" in text and "Outcome(finished=True, trained=4" in text
    assert len(names["scores"]) == 2 and (tmp_path / "model" / "model.safetensors").is_file()
    assert len([*tmp_path.glob("runs/centred-*/lines.txt")]) == 1


@pytest.mark.parametrize("page", FROM_TRL, ids=LANGUAGES)
def test_the_page_for_trls_users_shows_both_programs_as_the_files_have_them(page):
    shown = blocks(page, "python")
    for name in ("grpo_trl.py", "grpo_paddock.py"):
        assert (ROOT / "examples" / "trl" / name).read_text() in shown
