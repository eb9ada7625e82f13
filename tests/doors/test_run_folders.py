"""`paddock generate` and `paddock eval` take a run as `paddock export` does, and a prompt is answered on the spot."""

from __future__ import annotations

import json
import shutil

import pytest
from tiny_models import save_tiny

from paddock.cli import main
from paddock.commands.keys_of import EVAL, GENERATE

SMALL = ["rollout.dtype=float32", "data.max_response_length=6", "rollout.do_sample=False"]


def train(root, *more):
    """A run with checkpoints of steps 1 and 2."""
    model, rows = save_tiny(root / "model"), root / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(8)))
    settings = [f"model={model}", f"data={rows}", "data.train_batch_size=4", "optim.lr=1e-1", "trainer.save_freq=1",
                "actor_rollout_ref.actor.fsdp_config.dtype=float32", "trainer.total_training_steps=2",
                "trainer.logger=file", f"trainer.default_local_dir={root / 'a run'}", *more]  # fmt: skip
    assert main(["sft", *settings]) == 0
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def with_adapter(tmp_path_factory):
    pytest.importorskip("peft")
    return train(tmp_path_factory.mktemp("lora"), "model.lora_rank=4")


def answers(root, model: list[str], out="answers.jsonl"):
    assert main(["generate", *model, f"data={root / 'rows.jsonl'}", f"output={root / out}", *SMALL]) == 0
    return [json.loads(line)["responses"] for line in (root / out).read_text().splitlines()]


@pytest.mark.parametrize("kind", ["trained", "with_adapter"])
def test_a_run_a_step_and_its_actor_answer_as_the_exported_model(kind, request, tmp_path):
    root = request.getfixturevalue(kind)
    run, exported = root / "a run", {}
    for step in (1, 2):
        assert main(["export", str(run / f"global_step_{step}"), str(tmp_path / f"step{step}"), "--dtype", "fp32"]) == 0
        exported[step] = answers(root, [f"model={tmp_path / f'step{step}'}"])
    assert exported[1] != exported[2]
    assert answers(root, [str(run)]) == exported[2]
    assert answers(root, [f"model.path='{run / 'global_step_1'}'"]) == exported[1]
    if kind == "with_adapter":
        assert answers(root, [str(run / "global_step_1" / "actor")]) == exported[1]


def test_eval_measures_the_newest_checkpoint_of_a_run(trained, tmp_path, capsys):
    rows, scorer = tmp_path / "rows.jsonl", tmp_path / "scorer.py"
    rows.write_text(json.dumps({"prompt": "1+1=", "data_source": "mine", "reward_model": {"ground_truth": "2"}}))
    scorer.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    common = [f"data={rows}", f"custom_reward_function.path={scorer}", "--json", *SMALL[:2]]
    assert main(["eval", str(trained / "a run"), *common]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(trained / "a run" / "global_step_2" / "actor")


def test_a_damaged_checkpoint_is_passed_over_and_by_name_refused(trained, tmp_path, capsys):
    run = shutil.copytree(trained / "a run", tmp_path / "run")
    weights = run / "global_step_2" / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert answers(trained, [str(run)]) == answers(trained, [str(run / "global_step_1")])
    (run / "global_step_2" / "actor" / "config.json").unlink()
    assert main(["generate", str(run / "global_step_2"), "output=a.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "actor_rollout_ref.model.path=" in said and "there is no checkpoint" in said and "export" not in said


def test_settings_of_the_user_win_over_those_of_a_run(trained):
    from paddock.commands.run_model import with_run

    run, mine = trained / "a run", trained / "model"
    loaded = GENERATE.load(with_run(GENERATE, [str(run), f"model.tokenizer_path={mine}", "data=rows.jsonl"]))
    assert loaded.config.actor_rollout_ref.model.tokenizer_path == str(mine)
    assert loaded.config.actor_rollout_ref.model.path == str(run / "global_step_2" / "actor")


def test_a_run_is_read_in_the_type_in_which_its_rollout_computed(tmp_path):
    from paddock.commands.run_model import with_run

    root = train(tmp_path, "actor_rollout_ref.rollout.dtype=float16")
    run = root / "a run"
    for asked in (run, run / "global_step_1", run / "global_step_2" / "actor"):
        loaded = EVAL.load(with_run(EVAL, [f"model='{asked}'", "data=rows.jsonl"]))
        assert loaded.config.actor_rollout_ref.rollout.dtype == "float16", asked
    own = EVAL.load(with_run(EVAL, [str(run), "rollout.dtype=float32", "data=rows.jsonl"]))
    assert own.config.actor_rollout_ref.rollout.dtype == "float32"


def test_a_prompt_is_answered_on_the_console_as_a_row_would_be(trained, capsys):
    row = trained / "chat.jsonl"
    row.write_text(json.dumps({"prompt": [{"role": "user", "content": "3+1="}]}))
    assert main(["generate", str(trained / "a run"), f"data={row}", f"output={trained}/chat-out.jsonl", *SMALL]) == 0
    (expected,) = json.loads((trained / "chat-out.jsonl").read_text())["responses"]
    capsys.readouterr()
    assert main(["generate", str(trained / "a run"), "prompt=3+1=", *SMALL]) == 0
    said = capsys.readouterr()
    assert said.out == f"{expected}\n" and said.err.startswith("paddock: 1 response to 1 prompt")


def test_several_answers_to_a_prompt_are_numbered(capsys):
    assert main(["generate", "prompt=12+30=", "n=3"]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["[1] ", "[2] ", "[3] "]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt="], "prompt='': is empty"),
        (["prompt=a", "output=a.jsonl"], "fix: leave out one of prompt and output"),
        (["prompt=a", "data=rows.jsonl"], "fix: leave out one of prompt and data.val_files"),
        (["prompt=" + "1" * 40], "the prompt has 40 tokens\n  fix: data.max_prompt_length=40"),
        (["nowhere/at/all", "prompt=a"], "actor_rollout_ref.model.path=nowhere/at/all: no such folder"),
        (["prompt=a", "rollout.tempreature=1"], "did you mean actor_rollout_ref.rollout.temperature"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(arguments, message, capsys):
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_eval_names_the_adapter_that_it_measured(with_adapter, tmp_path, capsys):
    rows, scorer, actor = tmp_path / "rows.jsonl", tmp_path / "scorer.py", with_adapter / "a run/global_step_2/actor"
    rows.write_text(json.dumps({"prompt": "1+1=", "data_source": "mine", "reward_model": {"ground_truth": "2"}}))
    scorer.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    common = [f"data={rows}", f"custom_reward_function.path={scorer}", *SMALL[:2]]
    assert main(["eval", str(with_adapter / "a run"), *common]) == 0
    assert f"{with_adapter / 'model'} with {actor} on {rows}" in capsys.readouterr().out
    assert main(["eval", str(with_adapter / "a run"), "--json", *common]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["adapter"]) == (str(with_adapter / "model"), str(actor))
