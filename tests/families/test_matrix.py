"""Every family goes through every gear as docs/models.md says: it works, or is refused with the reason given there."""

from __future__ import annotations

from pathlib import Path

import pytest
from gears import GEARS
from specimens import FAMILIES, TITLES
from table import PAGE, committed, outcome, written
from tiny_zoo import ZOO

TABLE = committed(PAGE.read_text())


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("gear", GEARS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_a_gear(family, gear, root):
    assert outcome(family, gear, root) == TABLE[family][gear]


def test_the_page_lists_every_family_and_every_gear():
    assert list(TABLE) == list(FAMILIES)
    assert all(list(row) == list(GEARS) for row in TABLE.values())
    assert written(TABLE) in PAGE.read_text()
    assert set(ZOO) <= set(FAMILIES) == set(TITLES)
