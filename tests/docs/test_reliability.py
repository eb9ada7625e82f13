"""The tables of the reliability page say what the recorded attacks gave."""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_tables_are_those_of_the_records(language, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    sys.modules.pop("reliability", None)
    import reliability

    page = (ROOT / "docs" / language / "reliability.md").read_text()
    assert reliability.written(page, language) == page, "run `python tools/reliability.py`"
