"""Pages lead to each other: every link has a target, every page has its twin and its place in the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from pages import ALL, LANGUAGES, anchors, blocks, links, title, typed

DOCS = ROOT / "docs"
NAMES = sorted({page.name for language in LANGUAGES for page in (DOCS / language).glob("*.md")})
PAIRS = [
    *((DOCS / "en" / name, DOCS / "zh" / name) for name in NAMES),
    *((page.with_name(f"{page.stem[:-3]}.md"), page) for page in ALL if page.stem.endswith(("_zh", "_CN"))),
]


def broken(page: Path) -> list[str]:
    found = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            found.append(f"{link}: no such file in the project")
        elif anchor and anchor not in anchors(target):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", ALL, ids=title)
def test_every_link_of_a_page_leads_somewhere(page):
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# Über `a.b` (c)\n## Same\n## Same\n[1](#über-ab-c) [2](page.md#same-1) [3](#gone) [4](gone.md)\n"
        "```\n[no link](nowhere.md)\n# no heading\n```\n`[no](link.md)` [5](#no-heading) [6](https://a.b)\n"
    )
    monkeypatch.setitem(broken.__globals__, "ROOT", tmp_path)
    assert [line.partition(":")[0] for line in broken(page)] == ["#gone", "gone.md", "#no-heading"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_its_twin_in_the_other_language_and_leads_to_it(name):
    english, chinese = (DOCS / language / name for language in LANGUAGES)
    assert english.is_file() and chinese.is_file()
    assert f"../zh/{name}" in links(english) and f"../en/{name}" in links(chinese)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: title(pair[0]))
def test_both_languages_of_a_page_hold_the_same_commands_and_programs(pair):
    english, chinese = pair
    assert [command.words for command in typed(english)] == [command.words for command in typed(chinese)]
    assert blocks(english, "text") == blocks(chinese, "text")
    programs = [[re.sub(r" *#.*", "", block) for block in blocks(page, "python")] for page in pair]  # less comments
    assert programs[0] == programs[1]


def entries(nav: Any) -> Iterator[str]:
    """Every page that a nav of mkdocs names, at any depth."""
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from entries(target) if isinstance(target, list) else [target]


def test_every_page_is_once_in_the_nav_of_the_site():
    named = [*entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    assert len(named) == len(set(named))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - set(named) == set()
    assert [name for name in named if name not in pages and not (ROOT / name).is_file()] == []
