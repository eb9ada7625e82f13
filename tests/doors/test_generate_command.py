"""`paddock generate` as a user types it."""

from __future__ import annotations

import json

import pytest
import torch
from pyarrow import parquet
from tiny_models import byte_tokenizer, save_tiny

from paddock.cli import main
from paddock.commands.keys_of import EVAL, GENERATE
from paddock.engines.rollout.embedded.engine import EmbeddedEngine

SMALL = ["rollout.dtype=float32", "data.max_response_length=6"]


@pytest.fixture
def model(tmp_path):
    return save_tiny(tmp_path / "model")


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    asked = [
        {"prompt": "ab", "mark": 1},
        {"prompt": [{"role": "user", "content": "hello"}], "mark": 2},
        {"prompt": "c"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in asked))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_row_gets_its_answers_and_their_log_probs_beside_what_it_held(tmp_path, model, rows, capsys):
    out = tmp_path / "new" / "answers.jsonl"
    assert main(["generate", f"model={model}", f"data={rows}", f"output={out}", "n=3", *SMALL]) == 0
    assert "9 responses to 3 prompts" in capsys.readouterr().out
    found = read(out)
    assert [row.get("mark") for row in found] == [1, 2, None]
    assert found[1]["prompt"] == [{"role": "user", "content": "hello"}]
    from transformers import AutoModelForCausalLM

    tokenizer, net = byte_tokenizer(), AutoModelForCausalLM.from_pretrained(model)
    engine = EmbeddedEngine(net)  # the same draws, to have the tokens that the file holds as text
    config = GENERATE.load([f"model={model}", f"data={rows}", "n=3", *SMALL]).config
    from paddock.engines.rollout.base import Prompt
    from paddock.rollouts.collect import training_sampling

    asked = ["ab", "user: hello\nassistant:", "c"]
    for place, row in enumerate(found):
        prompt = tokenizer(asked[place])["input_ids"]
        drawn = engine.generate(
            [Prompt(prompt, [3 * place + i for i in range(3)])], training_sampling(config, frozenset({1}))
        )
        for i, completion in enumerate(drawn):
            assert row["responses"][i] == tokenizer.decode(completion.tokens, skip_special_tokens=True)
            assert row["lengths"][i] == len(completion.tokens) and row["stopped"][i] == completion.stopped
            with torch.no_grad():
                logits = net(input_ids=torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None]).sum()
            assert row["log_probs"][i] == pytest.approx(float(expected), abs=1e-4)


def test_parquet_and_jsonl_hold_the_same_and_batches_do_not_matter(tmp_path, model):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": f"{i}+1=", "extra_info": {"index": i}}) for i in range(7)))
    names = [f"model.path={model}", f"data.path={source}", "data.n_samples=2", *SMALL]
    assert main(["generate", *names, f"data.output_path={tmp_path}/a.jsonl"]) == 0
    assert main(["generate", *names, f"output={tmp_path}/b.parquet", "data.batch_size=3"]) == 0
    lines, table = read(tmp_path / "a.jsonl"), parquet.read_table(tmp_path / "b.parquet").to_pylist()
    for line, row in zip(lines, table, strict=True):
        assert line.pop("log_probs") == pytest.approx(row.pop("log_probs"), abs=1e-4)
        assert line == row


def test_a_run_that_fails_leaves_the_old_file_as_it_was(tmp_path, model, rows, monkeypatch):
    out = tmp_path / "answers.jsonl"
    out.write_text("old")
    monkeypatch.setattr(EmbeddedEngine, "answer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["generate", f"model={model}", f"data={rows}", f"output={out}", *SMALL])
    assert out.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_prompts_that_are_too_long_are_an_error_or_left_out_never_lost_in_silence(tmp_path, model, rows, capsys):
    command = [
        "generate",
        f"model={model}",
        f"data={rows}",
        f"output={tmp_path}/a.jsonl",
        "data.max_prompt_length=4",
        *SMALL,
    ]
    assert main(command) == 2
    assert "row 1 has a prompt of 22 tokens" in capsys.readouterr().err
    assert main([*command, "data.filter_overlong_prompts=True"]) == 0
    assert "1 prompts that are too long were left out" in capsys.readouterr().out
    assert [row["prompt"] for row in read(tmp_path / "a.jsonl")] == ["ab", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "output: no file to write is named\n  fix: output=answers.jsonl"),
        (["output=a.csv"], "output=a.csv: is not a .jsonl or .parquet file"),
        (["output=a.jsonl", "rollout.tempreature=1"], "did you mean actor_rollout_ref.rollout.temperature"),
        (["output=a.jsonl", "actor.strategy=fsdp"], "actor.strategy=fsdp: no such key"),
        (["output=a.jsonl", "data=/nowhere/rows.parquet"], "data.val_files=/nowhere/rows.parquet"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(arguments, message, capsys):
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_column_that_the_output_needs_is_not_overwritten(tmp_path, model, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "responses": ["kept"]}')
    assert main(["generate", f"model={model}", f"data={tmp_path}/rows.jsonl", f"output={tmp_path}/a.jsonl"]) == 2
    assert "has a column 'responses' already" in capsys.readouterr().err


def test_settings_without_effect_are_reported():
    assert GENERATE.load(["trainer.save_freq=3", "rollout.top_p=0.9"]).warnings == [
        "trainer.save_freq has no effect on `paddock generate`"
    ]


def test_an_environment_has_effect_and_nothing_else_is_said(capsys):
    keys = ["model=builtin:tiny-tools", "environment=builtin:calculator", "data.max_response_length=40", "n=8"]
    assert main(["generate", *keys, "prompt=37*48="]) == 0
    said = capsys.readouterr()
    assert "[tool: 1776=]" in said.out and "no effect" not in said.err
    for command in (GENERATE, EVAL):
        asked = command.load([*keys[:3], "data=builtin:products/test", "environment_kwargs={a: 1}"])
        assert [warning for warning in asked.warnings if "no effect" in warning] == []
