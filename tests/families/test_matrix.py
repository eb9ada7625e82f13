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


SAMPLE = ("llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen2_5_vl")
"""Families of the default tests: plain, with norms, windows, experts, latent attention, sinks, images."""
EACH = [pytest.param(family, marks=() if family in SAMPLE else pytest.mark.slow) for family in FAMILIES]


@pytest.mark.parametrize("gear", GEARS)
@pytest.mark.parametrize("family", EACH)
def test_a_family_in_a_gear(family, gear, root):
    assert outcome(family, gear, root) == TABLE[family][gear]


def test_the_page_lists_every_family_and_every_gear():
    assert list(TABLE) == list(FAMILIES)
    assert all(list(row) == list(GEARS) for row in TABLE.values())
    assert written(TABLE) in PAGE.read_text()
    assert set(ZOO) <= set(FAMILIES) == set(TITLES)
