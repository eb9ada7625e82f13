"""`paddock export`: what transformers loads from the folder is the policy of the checkpoint."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from paddock.cli import main
from paddock.config.engine import OptimConfig
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.value_head import HEAD_FILE

PROMPT = torch.tensor([[5, 9, 77, 30, 8]])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2, in fp32."""
    root = tmp_path_factory.mktemp("export")
    model, rows = save_tiny(root / "model"), root / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(8)))
    settings = [f"model={model}", f"data={rows}", "data.train_batch_size=4", "optim.lr=1e-2", "trainer.save_freq=1",
                "actor_rollout_ref.actor.fsdp_config.dtype=float32", "trainer.total_training_steps=2",
                "trainer.logger=file", f"trainer.default_local_dir={root / 'run'}"]  # fmt: skip
    assert main(["sft", *settings]) == 0
    return root / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def logits(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=PROMPT).logits


def policy_logits(run, step):
    model = tiny_model()
    state = load_file(run / f"global_step_{step}" / "actor" / "model.safetensors")
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


@pytest.mark.parametrize(("named", "step"), [(".", 2), ("global_step_1", 1), ("global_step_1/actor", 1)])
def test_a_run_a_step_or_its_actor_becomes_a_folder_that_transformers_loads(run, tmp_path, named, step, capsys):
    out = tmp_path / "out"
    assert main(["export", str(run / named), str(out)]) == 0
    assert f"global_step_{step}/actor -> {out}" in capsys.readouterr().out
    assert torch.equal(logits(out), policy_logits(run, step))
    assert not torch.equal(policy_logits(run, 1), policy_logits(run, 2))
    assert AutoTokenizer.from_pretrained(out).decode(AutoTokenizer.from_pretrained(out)("7+1=")["input_ids"]) == "7+1="
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {out.stat().st_mode & 0o666}


def test_without_dtype_weights_have_the_type_the_model_computed_in_and_masters_can_be_had(tmp_path):
    engine = Engine(SingleBackend(tiny_model(), Settings(optim=OptimConfig(), compute=torch.bfloat16)))
    engine.save(tmp_path / "actor")
    save_tiny(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "model" / file, tmp_path / "actor")
    for name, dtype in ((None, torch.bfloat16), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        out = tmp_path / f"out-{name}"
        assert main(["export", str(tmp_path / "actor"), str(out), *(["--dtype", name] if name else [])]) == 0
        assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype
        for key, tensor in load_file(out / "model.safetensors").items():
            assert torch.equal(tensor, tiny_model().state_dict()[key].to(dtype))


def test_a_large_model_is_cut_into_shards(run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "out"), "--max-shard-size", "100KB"]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(tmp_path / "out"), policy_logits(run, 2))


def test_a_damaged_newest_checkpoint_is_passed_over_and_by_name_refused(run, tmp_path, capsys):
    weights = run / "global_step_2" / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["export", str(run / "global_step_2"), str(tmp_path / "out")]) == 2
    assert "is damaged: actor/model.safetensors has" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert torch.equal(logits(tmp_path / "out"), policy_logits(run, 1))


def test_a_checkpoint_without_tokenizer_takes_the_one_of_the_run(run, tmp_path):
    actor = run / "global_step_2" / "actor"
    manifest = json.loads((run / "global_step_2" / "manifest.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (actor / name).unlink()
        del manifest["files"][f"actor/{name}"]
    (run / "global_step_2" / "manifest.json").write_text(json.dumps(manifest))
    assert main(["export", str(run / "global_step_2"), str(tmp_path / "out")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([260 - 1]) != ""


def test_nothing_is_overwritten_and_nothing_half_written_stays(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("kept")
    assert main(["export", str(run), str(tmp_path / "mine")]) == 2
    assert f"OUT={tmp_path}/mine: is there already" in capsys.readouterr().err
    late = "save_pretrained"  # after the weights are written
    monkeypatch.setattr(PreTrainedTokenizerBase, late, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["export", str(run), str(tmp_path / "out")])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "run"]


def test_what_is_no_policy_is_refused(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "there is no checkpoint"), (tmp_path / "nowhere", "no such folder")):
        assert main(["export", str(folder), str(tmp_path / "out")]) == 2
        assert f"CHECKPOINT={folder}: {message}" in capsys.readouterr().err
    critic = shutil.copytree(run / "global_step_2" / "actor", tmp_path / "critic")
    (critic / HEAD_FILE).write_bytes(b"")
    assert main(["export", str(critic), str(tmp_path / "out")]) == 2
    assert "is a critic, not a language model" in capsys.readouterr().err
