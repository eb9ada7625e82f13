"""Every family is tested with every feature as docs/models.md says: it works, or is refused with the reason there."""

from __future__ import annotations

from pathlib import Path

import pytest
from features import FEATURES
from specimens import FAMILIES, TITLES
from table import PAGE, committed, outcome, written
from tiny_zoo import ZOO

TABLE = committed(PAGE.read_text())


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


SAMPLE = ("qwen3", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen2_5_vl")
"""Families of the default tests: with norms, windows, experts, latent attention, sinks, images."""
EACH = [pytest.param(family, marks=() if family in SAMPLE else pytest.mark.slow) for family in FAMILIES]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", EACH)
def test_a_family_with_a_feature(family, feature, root):
    assert outcome(family, feature, root) == TABLE[family][feature]


def test_the_page_lists_every_family_and_every_feature():
    assert list(TABLE) == list(FAMILIES)
    assert all(list(row) == list(FEATURES) for row in TABLE.values())
    assert written(TABLE) in PAGE.read_text()
    assert set(ZOO) <= set(FAMILIES) == set(TITLES)
