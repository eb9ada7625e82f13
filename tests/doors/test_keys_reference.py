"""The generated reference of keys, and what help knows about them, are what the schema and the source say."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from conftest import ROOT
from unread_keys import unread_keys

from paddock.config import tree


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("keys_reference", ROOT / "tools" / "keys_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_pages_and_data_are_up_to_date(reference):
    for file, text in reference.files().items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is not up to date: make keys-reference"


def test_every_key_of_the_schema_is_named_where_code_acts_on_it():
    assert unread_keys(ROOT / "paddock", tree.leaves()) == set()


def test_most_keys_have_a_chinese_meaning_and_no_translation_is_of_another_key(reference):
    chinese = reference.translations()
    users = [key for key in reference.entries() if key.split(".")[0] in ("data", "trainer", "algorithm", "critic")]
    translated = sum(key in chinese for key in users)
    assert translated > 0.9 * len(users)
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in text) or "token" in text for text in chinese.values())
