"""The reference of the library is what signatures and docstrings say, and every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib.util
import sys

import pytest
from conftest import ROOT

import paddock


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools" / "api_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(reference):
    for file, text in reference.files().items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is not up to date: make api-reference"


def test_every_exported_name_has_an_example_and_so_has_every_method_that_the_guide_names(reference):
    assert {name for name in paddock.EXPORTS if ">>>" not in (getattr(paddock, name).__doc__ or "")} == set()
    methods = {name for name, _ in reference.members(paddock.Run)}
    assert methods >= {
        "plan", "train", "__iter__", "evaluate", "generate", "export", "save", "report", "sample", "score",
        "advantages", "learn", "sync", "close", "config", "folder",
    }  # fmt: skip


def test_every_entry_has_a_chinese_sentence_and_no_sentence_is_left_over(reference):
    names = {name for exported in paddock.EXPORTS for name, _ in reference.examples(exported)}
    assert set(reference.CHINESE.meanings) == names


@pytest.mark.parametrize("name", paddock.EXPORTS)
def test_the_examples_of_an_exported_name_run(name, reference, catalogues, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))  # no model but the built-in one is on the disk
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    names = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(verbose=False)
    for title, text in reference.examples(name):
        test = doctest.DocTestParser().get_doctest(text, names, title, title, 0)
        runner.run(test, clear_globs=False)
        names.update(test.globs)
    assert runner.summarize(verbose=False).failed == 0
    assert runner.summarize(verbose=False).attempted > 0
