"""Data is named, and neither a model nor hardware: the run is made for this machine, and every choice is said."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import ROOT

from paddock.commands.keys_of import SFT
from paddock.config import tree
from paddock.errors import UserError
from paddock.facts.machine import GIB, Machine
from paddock.loading.load import load

LAPTOP = Machine("cpu", 0, None, 16 * GIB, 4, frozenset())
EIGHT_GPUS = Machine("cuda", 8, 80 * GIB, 1024 * GIB, 96, frozenset({"vllm", "ray"}))
MODEL, LR = "actor_rollout_ref.model.path", "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(autouse=True)
def no_models(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def rows(folder, count=200, question="1+1=", answer="2", name="mine.jsonl"):
    (folder / name).write_text(
        "".join(json.dumps({"question": question, "answer": answer}) + "\n" for _ in range(count))
    )
    return f"data.train_files={folder / name}"


def value(loaded, key):
    return tree.get(loaded.config, key)


def test_a_laptop_gets_the_built_in_model_on_its_cpu_and_every_choice_is_a_line_with_its_key(tmp_path):
    loaded = load([rows(tmp_path)], LAPTOP)
    expected = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        MODEL: "builtin:tiny",
        "algorithm.adv_estimator": "grpo",
        "data.max_prompt_length": 8,
        "data.max_response_length": 8,
        "data.train_batch_size": 32,
        "actor_rollout_ref.rollout.n": 8,
        LR: 5e-4,
        "trainer.total_training_steps": 150,
    }
    assert {key: value(loaded, key) for key in expected} == expected
    for key, chosen in expected.items():
        (line,) = [line for line in loaded.warnings if line.startswith(f"chosen: {key}={chosen} (")]
        assert "\n" not in line
        assert loaded.origins[key].startswith("chosen for your data")
    assert value(loaded, "critic.enable") is False
    assert value(loaded, "actor_rollout_ref.actor.ppo_mini_batch_size") == 32
    assert value(loaded, "actor_rollout_ref.rollout.dtype") == "float32"


@pytest.mark.parametrize(
    "setting",
    [f"{LR}=0.01", "data.train_batch_size=7", "data.max_prompt_length=99", "trainer.total_training_steps=3",
     "algorithm.adv_estimator=rloo", "trainer.device=cpu", "actor_rollout_ref.rollout.dtype=bfloat16"],
)  # fmt: skip
def test_what_the_user_sets_is_never_chosen(tmp_path, setting):
    loaded = load([rows(tmp_path), setting], LAPTOP)
    key, _, text = setting.partition("=")
    assert str(value(loaded, key)) == text and loaded.origins[key] == "command line"
    assert not any(line.startswith(f"chosen: {key}=") for line in loaded.warnings)
    assert value(loaded, MODEL) == "builtin:tiny"


@pytest.mark.parametrize(
    "setting",
    [f"{MODEL}=Qwen/Qwen2.5-0.5B", "trainer.n_gpus_per_node=8", "trainer.nnodes=2", "trainer.device=cuda"],
)
def test_a_run_that_names_a_model_or_an_accelerator_is_left_as_it_was(tmp_path, setting):
    loaded = load([rows(tmp_path), setting], LAPTOP)
    assert not any(line.startswith("chosen: ") for line in loaded.warnings)
    assert value(loaded, "data.train_batch_size") == 1024 and value(loaded, "algorithm.adv_estimator") == "gae"


def test_data_that_is_not_here_is_planned_for_the_guide(tmp_path):
    loaded = load([f"data.train_files={tmp_path}/gsm8k/train.parquet"], LAPTOP)
    assert value(loaded, MODEL) == "Qwen/Qwen2-7B-Instruct"


@pytest.mark.parametrize(("count", "batch"), [(1, 1), (5, 1), (8, 2), (50, 8), (128, 32), (10**4, 32)])
def test_the_batch_fits_the_rows(tmp_path, count, batch):
    assert value(load([rows(tmp_path, count)], LAPTOP), "data.train_batch_size") == batch


def test_the_batch_fits_the_rows_that_are_used(tmp_path):
    loaded = load([rows(tmp_path), "data.train_max_samples=10"], LAPTOP)
    assert value(loaded, "data.train_batch_size") == 2


def test_lengths_fit_the_rows_and_a_prompt_that_the_built_in_model_cannot_read_has_a_way_out(tmp_path):
    loaded = load([rows(tmp_path, question="é" * 50, answer="x" * 30)], LAPTOP)
    assert (value(loaded, "data.max_prompt_length"), value(loaded, "data.max_response_length")) == (104, 48)
    with pytest.raises(UserError, match=r"reads 504 bytes.* has 600\n  fix: paddock models get smollm2-135m-instruct"):
        load([rows(tmp_path, question="x" * 600)], LAPTOP)


def test_one_of_several_gpus_is_taken(tmp_path):
    loaded = load([rows(tmp_path)], EIGHT_GPUS)
    keys = ("trainer.device", "trainer.n_gpus_per_node", "actor_rollout_ref.rollout.name")
    assert [value(loaded, key) for key in keys] == ["cuda", 1, "embedded"]


def model(folder, size=256, architecture="Qwen2ForCausalLM", weights=True):
    folder.mkdir(parents=True)
    config = json.loads((ROOT / "paddock/assets/tiny/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": size, "architectures": [architecture]}))
    shutil.copy(ROOT / "paddock/assets/tiny/chat_template.jinja", folder)
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def test_a_language_model_that_is_on_this_disk_comes_before_the_built_in_one(tmp_path):
    fetched = tmp_path / "cache" / "paddock" / "models"
    small = model(fetched / "small")
    model(fetched / "encoder", 512, "BertForMaskedLM")
    model(fetched / "incomplete", 512, weights=False)
    model(fetched / "giant", 32768)
    loaded = load([rows(tmp_path, question="What is it? " * 20)], LAPTOP)
    assert value(loaded, MODEL) == small
    lengths = [value(loaded, f"data.max_{part}_length") for part in ("prompt", "response")]
    assert lengths == [192, 256] and value(loaded, LR) == 1e-5
    cached = tmp_path / "hub" / "hub" / "models--org--name" / "snapshots" / "abc"
    model(cached, 512)
    assert value(load([rows(tmp_path)], LAPTOP), MODEL) == "org/name"


def test_the_warm_start_takes_the_same_choices_and_names_those_that_it_reads(tmp_path):
    loaded = SFT.load([rows(tmp_path), "trainer.device=cpu"])
    assert value(loaded, MODEL) == "builtin:tiny" and value(loaded, "data.train_batch_size") == 32
    said = [line.split("=")[0].removeprefix("chosen: ") for line in loaded.warnings if line.startswith("chosen: ")]
    assert LR in said and "actor_rollout_ref.rollout.n" not in said and "algorithm.adv_estimator" not in said


def test_a_folder_with_a_held_out_split_is_validated_on(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    rows(folder, name="train.jsonl")
    assert value(load([f"data.train_files={folder}"], LAPTOP), "data.val_files") is None
    rows(folder, name="test.jsonl")
    assert value(load([f"data.train_files={folder}"], LAPTOP), "data.val_files") == [str(folder)]


def test_passes_that_the_user_asks_for_decide_how_long_a_run_is(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 64)
    epochs = "trainer.total_epochs=2"
    for arguments in ([epochs], [epochs, f"data.train_files={tmp_path}/rows.jsonl"]):
        config = load(arguments).config
        assert config.trainer.total_training_steps is None and config.trainer.total_epochs == 2
        assert SFT.load(arguments).config.trainer.total_training_steps is None
    assert load([epochs, "trainer.total_training_steps=7"]).config.trainer.total_training_steps == 7


CHOICES = ("data.train_batch_size", "data.max_response_length", "actor_rollout_ref.rollout.n", LR,
           "algorithm.adv_estimator", "trainer.total_training_steps", "actor_rollout_ref.rollout.dtype")  # fmt: skip


def test_a_run_of_paddocks_own_that_names_the_built_in_model_gets_what_one_without_a_model_gets(tmp_path):
    unnamed = load([rows(tmp_path)], LAPTOP)
    named = load([rows(tmp_path), f"{MODEL}=builtin:tiny"], LAPTOP, chooses=True)
    assert [value(named, key) for key in CHOICES] == [value(unnamed, key) for key in CHOICES]
    embedded, asked = load([], LAPTOP), load([f"{MODEL}=builtin:tiny"], LAPTOP, chooses=True)
    assert asked.as_dict() == embedded.as_dict()


@pytest.mark.parametrize("machine", [LAPTOP, EIGHT_GPUS])
def test_devices_are_no_reason_for_another_model_or_data(tmp_path, machine):
    loaded = load(["trainer.n_gpus_per_node=2"], machine, chooses=True)
    assert (value(loaded, MODEL), value(loaded, LR)) == ("builtin:tiny", 5e-4)
    assert value(loaded, "data.train_files") == "builtin:addition/train"
    assert value(loaded, "trainer.n_gpus_per_node") == 2
    assert value(loaded, "trainer.device") == ("cpu" if machine is LAPTOP else "cuda")
    of_verl = load(["trainer.n_gpus_per_node=8"], machine)
    assert value(of_verl, MODEL) == "Qwen/Qwen2-7B-Instruct"


def test_a_named_model_that_the_one_device_holds_gets_choices_and_a_larger_one_the_guides(tmp_path):
    small, giant = model(tmp_path / "small"), model(tmp_path / "giant", 32768)
    loaded = load([rows(tmp_path), f"{MODEL}={small}", "data.max_response_length=99"], LAPTOP, chooses=True)
    found = [value(loaded, key) for key in CHOICES]
    assert found == [16, 99, 8, 1e-5, "grpo", 30, "float32"] and value(loaded, MODEL) == small
    assert value(load([rows(tmp_path), f"{MODEL}={giant}"], LAPTOP, chooses=True), "data.train_batch_size") == 1024
    assert value(load([rows(tmp_path), f"{MODEL}={small}"], EIGHT_GPUS, chooses=True), "data.train_batch_size") == 1024


def test_a_small_model_with_verls_learning_rate_is_told_what_is_usual(tmp_path):
    told = "actor_rollout_ref.actor.optim.lr=1e-06 is verl's default, for large models; for 0.56 million parameters"
    of_verl = [rows(tmp_path), f"{MODEL}=builtin:tiny", "data.train_batch_size=32"]
    assert any(line.startswith(told) for line in load(of_verl, LAPTOP).warnings)
    assert not any("is usual" in line for line in load([*of_verl, f"{LR}=1e-6"], LAPTOP).warnings)
    assert not any("is usual" in line for line in load(of_verl, LAPTOP, trains=False).warnings)
    assert not any("is usual" in line for line in load(of_verl, LAPTOP, chooses=True).warnings)


def test_a_run_that_goes_on_has_its_own_choices_though_a_model_and_fewer_rows_have_come_since(tmp_path):
    folder = tmp_path / "run"
    line = [rows(tmp_path), f"trainer.default_local_dir={folder}"]
    first = load(line, LAPTOP)
    folder.mkdir()
    start = {"after_step": 0, "settings": {key: value(first, key) for key in tree.leaves()}, "origins": first.origins}
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    model(tmp_path / "cache" / "paddock" / "models" / "small")
    rows(tmp_path, count=8)
    fresh = load(line, LAPTOP)
    assert value(fresh, MODEL).endswith("small"), "there is no checkpoint: the run begins anew"
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    again = load(line, LAPTOP)
    assert again.as_dict() == first.as_dict()
    assert f"chosen: {MODEL}=builtin:tiny (as this run has it)" in again.warnings
    longer = load([*line, "trainer.total_training_steps=300", "data.train_batch_size=4"], LAPTOP)
    assert (value(longer, "trainer.total_training_steps"), value(longer, "data.train_batch_size")) == (300, 4)
    anew = load([*line, "trainer.resume_mode=disable"], LAPTOP)
    assert value(anew, MODEL).endswith("small")


def test_the_length_of_prompts_that_an_environment_or_tools_write_is_not_chosen_by_the_rows(tmp_path):
    for setting in ("environment=builtin:guess", "actor_rollout_ref.rollout.multi_turn.enable=True"):
        loaded = load([rows(tmp_path), setting], LAPTOP)
        assert value(loaded, "data.max_prompt_length") == 512 and value(loaded, "data.max_response_length") == 8
