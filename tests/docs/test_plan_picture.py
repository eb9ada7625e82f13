"""The picture of a plan in the README is what the command above it prints."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from conftest import ROOT
from pages import READMES

from paddock.facts.machine import this_machine


@pytest.mark.skipif(this_machine().has("vllm"), reason="with vLLM installed a plan chooses it for rollouts")
def test_the_picture_is_the_plan_of_the_command_above_it(monkeypatch):
    spec = importlib.util.spec_from_file_location("plan_picture", ROOT / "tools" / "plan_picture.py")
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, tool)
    spec.loader.exec_module(tool)
    assert tool.drawn(tool.printed()) == tool.FILE.read_text(encoding="utf-8"), "python tools/plan_picture.py"
    for page in READMES:
        text = page.read_text()
        assert text.index(tool.COMMAND) < text.index("docs/images/plan.svg") < text.index(tool.COMMAND) + 400
