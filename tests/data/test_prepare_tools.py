"""`paddock data` for conversations with tools: verl's columns, and rows whose prompt shows calls that can be read."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from conftest import ROOT
from pyarrow import parquet

from paddock.data.prepare import main
from paddock.data.prepare.gsm8k_sft import CALCULATOR, pieces
from paddock.data.prepare.gsm8k_tools import CALCULATING, CALL_FORMAT, EXAMPLE, SCORING_TOOL
from paddock.environments.calls import FORMATS
from paddock.environments.tool_environment import calculator
from paddock.environments.tools import tool_of, written
from paddock.rewards.rules import compute_score

QUESTION = "Two pens cost 4 coins. What do 600 pens cost?"
RECORD = {"question": QUESTION, "answer": "4/2 = 2\n600*2 = 1200\n#### 1,200"}
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
VERL = ("gsm8k_tool_agent_loop", "gsm8k_multiturn_w_tool")


def prepared(tmp_path, name: str, record: dict = RECORD) -> dict:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(record) + "\n")
    flags = ["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")]
    assert main(name, flags) == 0
    return parquet.read_table(tmp_path / "out" / "test.parquet").to_pylist()[0]


@pytest.mark.parametrize("name", VERL)
def test_a_record_becomes_a_row_with_the_columns_that_verls_tools_read(tmp_path, name):
    row = prepared(tmp_path, name)
    system, user = row.pop("prompt")
    assert system["role"] == "system" and SCORING_TOOL in system["content"] and "####" in system["content"]
    assert user == {"role": "user", "content": f"{QUESTION} {INSTRUCTION}"}
    agent = {"agent_name": "tool_agent"} if name == "gsm8k_tool_agent_loop" else {}
    assert row == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {
            **{"split": "test", "index": 0, "answer": RECORD["answer"], "question": QUESTION},
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1200"}}},
            "interaction_kwargs": {"query": user["content"], "ground_truth": "1200"},
        },
        **agent,
    }


def test_a_row_for_the_calculator_has_an_example_and_the_question_alone_as_the_last_message(tmp_path):
    row = prepared(tmp_path, "gsm8k_calculator")
    roles = [message["role"] for message in row["prompt"]]
    assert roles == ["system", *(role for role, _ in EXAMPLE), "user"]
    assert row["prompt"][0]["content"] == CALCULATING and row["prompt"][-1]["content"] == QUESTION
    assert row["reward_model"]["ground_truth"] == "1200" and row["extra_info"]["question"] == QUESTION
    assert "agent_name" not in row, "the keys of a run say which tools there are"


def test_the_example_is_what_the_calculator_and_the_rule_make_of_it():
    """Every call of it can be read, the tool answers it as the example has it, and its last turn is scored as right."""
    called = 0
    for (role, said), (_, answered) in pairwise(EXAMPLE):
        calls, malformed = FORMATS[CALL_FORMAT].parse(said)
        assert not malformed and (not calls or role == "assistant")
        called += len(calls)
        assert [written(calculator(**call.arguments)) for call in calls] == [answered] * len(calls)
    assert called == 2
    assert compute_score("openai/gsm8k", EXAMPLE[-1][1], written(calculator("15 * 6 * 5 * 4 / 5"))) == 1.0


@pytest.mark.parametrize("name", [*VERL, "gsm8k_calculator"])
def test_the_last_line_names_the_keys_that_a_run_with_tools_needs(tmp_path, capsys, name):
    prepared(tmp_path, name)
    last = capsys.readouterr().out.splitlines()[-1]
    turns = "actor_rollout_ref.rollout.multi_turn"
    tools = (
        f"function_tool_path=calculator {turns}.format=mistral" if name == "gsm8k_calculator" else "tool_config_path="
    )
    assert f"{turns}.enable=True {turns}.{tools}" in last


@pytest.mark.parametrize("name", [*VERL, "gsm8k_calculator"])
def test_a_record_without_an_answer_is_named(tmp_path, capsys, name):
    with pytest.raises(AssertionError):
        prepared(tmp_path, name, {"question": "?", "answer": "four"})
    assert "train.jsonl row 0, column 'answer'" in capsys.readouterr().err


NOTED = "Half of them: 4/2 = <<4/2=2>>2 coins.\nAll cost $<<600*2=1200>>1,200, or <<.5*1=.5>>half.\n#### 1,200"


def test_supervised_rows_have_the_authors_answer_without_their_computations(tmp_path):
    row = prepared(tmp_path, "gsm8k_sft", {"question": QUESTION, "answer": NOTED})
    asked, answered = row.pop("messages")
    assert row == {} and asked["content"] == f"{QUESTION} {INSTRUCTION}", "asked as `paddock data gsm8k` asks"
    assert answered["content"] == "Half of them: 4/2 = 2 coins.\nAll cost $1,200, or half.\n#### 1,200"


def test_computations_become_calls_whose_results_begin_the_next_turn(tmp_path):
    row = prepared(tmp_path, "gsm8k_calculator_sft", {"question": QUESTION, "answer": NOTED})
    assert json.loads(row["tools"]) == [CALCULATOR]
    said = [(message["role"], message["content"]) for message in row["messages"][1:]]
    assert said == [
        ("assistant", "Half of them: 4/2 ="),
        ("tool", "2"),
        ("assistant", "2 coins.\nAll cost $"),
        ("tool", "1200"),
        ("assistant", "1,200, or"),
        ("tool", "0.5"),
        ("assistant", "half.\n#### 1,200"),
    ]
    calls = [call["function"] for message in row["messages"] for call in message["tool_calls"] or ()]
    assert [call["name"] for call in calls] == ["calculator"] * 3
    expressions = [json.loads(call["arguments"])["expression"] for call in calls]
    assert expressions == ["4/2", "600*2", ".5*1"]
    assert [written(calculator(expression)) for expression in expressions] == ["2", "1200", "0.5"]


def test_calls_in_plain_text_follow_the_prompt_that_shows_them_and_are_read_as_they_are_written(tmp_path):
    record = {"question": QUESTION, "answer": NOTED}
    asked = prepared(tmp_path, "gsm8k_calculator", record)["prompt"]
    row = prepared(tmp_path, "gsm8k_calculator_text_sft", record)
    messages = [{"role": message["role"], "content": message["content"]} for message in row["messages"]]
    assert messages[: len(asked)] == asked and json.loads(row["tools"]) == [CALCULATOR]
    turns = [message["content"] for message in messages[len(asked) :] if message["role"] == "assistant"]
    read = [FORMATS[CALL_FORMAT].parse(turn) for turn in turns]
    assert [malformed for _, malformed in read] == [[]] * 4
    assert [call.arguments["expression"] for calls, _ in read for call in calls] == ["4/2", "600*2", ".5*1"]
    assert turns[0].startswith("Half of them: 4/2 =\n") and turns[-1] == "half.\n#### 1,200"


def test_the_tool_of_supervised_rows_is_the_one_that_a_run_shows_to_the_policy():
    assert tool_of(calculator).schema() == CALCULATOR


def test_the_calculator_gives_what_gsm8ks_authors_noted():
    file = ROOT.parent / "shared/data/gsm8k/train.jsonl"
    if not file.is_file():
        pytest.skip("needs GSM8K's train.jsonl, which is not part of the project")
    answers = [json.loads(line)["answer"] for line in file.read_text().splitlines()]
    noted = [(expression, result) for answer in answers for _, expression, result in pieces(answer)[:-1]]
    assert len(noted) > 20_000
    assert [pair for pair in noted if written(calculator(pair[0])) != pair[1]] == []
