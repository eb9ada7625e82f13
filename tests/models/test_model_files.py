"""A damaged model folder is answered with the file and what is wrong with it, never with a library's traceback."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from paddock.errors import UserError
from paddock.models.files import ModelPath, check_weights, damage_of
from paddock.models.load import load_causal_lm, load_config, load_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(ROOT / "paddock" / "assets" / "tiny", tmp_path / "model")


def refusal(call, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        call(str(folder))
    assert error.value.fix and error.value.key == "actor_rollout_ref.model.path" and error.value.value == str(folder)
    return error.value.reason


def header(length: int, content: bytes = b"") -> bytes:
    return struct.pack("<Q", length) + content


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "header too small"),
        (b"short", "header too small"),
        (b"junk" * 5000, "header too large"),
        (header(10**6), "invalid header length"),
        (header(4, b"{{{{"), "invalid JSON in header"),
        (header(2, b"[]"), "invalid JSON in header"),
        (header(12, b'{"a": "bcd"}'), "invalid JSON in header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a pointer of git-lfs"),
    ],
)
def test_a_file_that_is_no_safetensors_is_described(folder, content, problem):
    (folder / WEIGHTS).write_bytes(content)
    assert problem in damage_of(folder / WEIGHTS)
    assert f"{WEIGHTS} is damaged: " in refusal(load_causal_lm, folder)


def test_a_file_that_is_whole_has_no_damage_and_one_byte_decides(folder):
    assert damage_of(folder / WEIGHTS) is None
    content = (folder / WEIGHTS).read_bytes()
    for other in (content[:-1], content + b"x"):
        (folder / WEIGHTS).write_bytes(other)
        assert f"not fully covered; it has {len(other)} bytes" in damage_of(folder / WEIGHTS)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", f"{INDEX} cannot be read as JSON"),
        ("[" * 10**6, f"{INDEX} cannot be read as JSON"),
        ([], "no weight_map"),
        ({"metadata": {}}, "no weight_map"),
        ({"metadata": {}, "weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is not in"),
    ],
)
def test_an_index_of_shards_is_checked(folder, index, problem):
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    assert problem in refusal(load_causal_lm, folder)


def test_shards_that_are_whole_are_found_and_a_damaged_one_is_named(folder):
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "part.safetensors"}}))
    assert check_weights(folder, ModelPath("m", "k")) == [folder / "part.safetensors"]
    (folder / "part.safetensors").write_bytes(b"junk")
    assert "part.safetensors is damaged" in refusal(load_causal_lm, folder)


def test_a_folder_without_weights_says_what_it_holds(folder):
    (folder / WEIGHTS).unlink()
    assert "the folder has no weights" in (reason := refusal(load_causal_lm, folder)) and "tokenizer.json" in reason


def test_tensors_of_another_shape_are_named_with_both_shapes(folder):
    weights = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name][:7].clone()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    assert f"{name} has (7, 128), and (512, 128) is expected" in refusal(load_causal_lm, folder)


class Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize("content", [{"a": Harmful()}, [1, 2], b"junk" * 99, b""])
def test_a_pickle_that_is_no_plain_tensors_is_refused_and_not_run(folder, content, capfd):
    (folder / WEIGHTS).unlink()
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    assert "pytorch_model.bin cannot be used" in refusal(load_causal_lm, folder)
    assert "this must not run" not in capfd.readouterr().out


def test_a_pickle_of_tensors_is_still_loaded(folder):
    weights = load_file(folder / WEIGHTS)
    expected = load_causal_lm(str(folder)).state_dict()
    (folder / WEIGHTS).unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    found = load_causal_lm(str(folder)).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "7", '"text"'])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_holds_no_json_object_is_named(folder, name, content):
    (folder / name).write_text(content)
    assert name in refusal(load_config if name == "config.json" else load_tokenizer, folder)


@pytest.mark.parametrize("changes", [{"model_type": "nope9"}, {"num_hidden_layers": 9}])
def test_a_config_that_transformers_refuses_is_an_error_in_words(folder, changes):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    assert "config.json cannot be used" in refusal(load_config, folder)


@pytest.mark.parametrize("gone", [("tokenizer.json",), ("tokenizer.json", "tokenizer_config.json")])
def test_a_folder_without_a_tokenizer_is_not_given_an_empty_one(folder, gone):
    for name in gone:
        (folder / name).unlink()
    assert "the folder has no tokenizer" in refusal(load_tokenizer, folder)


@pytest.mark.parametrize("model", [{"type": "Nope"}, {"type": "BPE"}, None, []])
def test_a_tokenizer_of_another_shape_is_an_error_in_words(folder, model):
    values = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(values | {"model": model}))
    assert "tokenizer" in refusal(load_tokenizer, folder)


def test_a_file_in_place_of_a_folder_is_called_a_file(tmp_path):
    (tmp_path / "model").write_text("x")
    assert refusal(load_config, tmp_path / "model") == "is a file, not a folder"
