"""A last message of the assistant's is the beginning of its answer: the policy goes on with it, and it is no truth."""

from __future__ import annotations

import json

import pytest
from byte_tokenizer import byte_tokenizer
from templates.families import FAMILIES
from test_dataset import dataset, record, write

from paddock.config.schema import DataConfig
from paddock.data.chat import PromptEncoder, with_answer
from paddock.data.unscored import AnswerDataset, UnscoredDataset
from paddock.errors import UserError

ASKED = [{"role": "user", "content": "What is 3 + 4?"}]
BEGINNINGS = ["Let me solve this step by step.\n<think>", "The answer is", "<think>\nI should call the tool.", "Sure: "]


@pytest.mark.parametrize("begun", BEGINNINGS, ids=lambda text: text[:6])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_beginning_is_written_as_transformers_continues_it(name, begun):
    tokenizer = FAMILIES[name].tokenizer()
    prompt = [*ASKED, {"role": "assistant", "content": begun}]
    encoder = PromptEncoder(tokenizer)
    try:
        expected = tokenizer.apply_chat_template(prompt, continue_final_message=True, return_dict=False)
    except (
        ValueError,
        TypeError,
    ):  # it takes the message apart so that nothing can be continued, or is for tools alone
        with pytest.raises(UserError, match="the chat template refuses it"):
            encoder.encode([prompt], ["a row"], "prompt")
        return
    found, plain = encoder.encode([prompt, ASKED], ["a row", "another"], "prompt")
    assert found == expected == FAMILIES[name].dialogue().prompt(prompt), "in conversations, too"
    assert plain == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(found)
    assert text.rstrip().endswith(begun.rstrip()), "nothing stands behind the beginning"


def test_most_families_continue_an_answer():
    refused = set()
    for name, family in FAMILIES.items():
        try:
            PromptEncoder(family.tokenizer()).encode(
                [[*ASKED, {"role": "assistant", "content": "So"}]], ["row"], "prompt"
            )
        except UserError:
            refused.add(name)
    assert refused == {"hermes"}, "its template here is for tools alone"


def test_a_beginning_is_part_of_the_prompt_and_never_the_truth(tmp_path):
    begun = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "So"}]
    (row,) = dataset(write(tmp_path / "a.jsonl", [{"prompt": begun, "answer": "7"}])).rows([0])
    assert byte_tokenizer().decode(row.tokens) == "<|user|>ab<|end|><|assistant|>So"
    assert row.ground_truth == "7" and row.messages == begun and row.written_prompt == begun
    (row,) = dataset(write(tmp_path / "b.jsonl", [{"prompt": begun}])).rows([0])
    assert row.ground_truth is None and row.messages == begun
    (row,) = dataset(write(tmp_path / "c.jsonl", [record("ab", prompt=begun)])).rows([0])
    assert byte_tokenizer().decode(row.tokens).endswith("So")


def test_whoever_sets_the_generation_prompt_has_a_new_turn_as_verl_writes_it(tmp_path):
    begun = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "So"}]
    path = write(tmp_path / "a.jsonl", [record("ab", prompt=begun)])
    (row,) = dataset(path, apply_chat_template_kwargs={"add_generation_prompt": True}).rows([0])
    assert byte_tokenizer().decode(row.tokens).endswith("So<|end|><|assistant|>")


def test_the_last_message_of_a_conversation_is_its_answer(tmp_path):
    whole = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "7"}]
    for name in ("messages", "conversations"):
        path = write(tmp_path / f"{name}.jsonl", [{name: whole}])
        (row,) = dataset(path).rows([0])
        assert (row.ground_truth, row.messages) == ("7", whole[:1])
        (row,) = UnscoredDataset(path, byte_tokenizer(), DataConfig(), key="data.train_files").rows([0])
        assert row.messages == whole[:1]


def test_supervised_training_learns_what_follows_a_beginning(tmp_path):
    begun = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "So"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": begun, "answer": " 7"}])
    (row,) = AnswerDataset(path, byte_tokenizer(), DataConfig(), key="data.train_files").rows([0])
    assert byte_tokenizer().decode(row.tokens).endswith("So") and byte_tokenizer().decode(row.ground_truth[:-1]) == " 7"


def test_a_beginning_and_what_follows_are_one_message_of_a_conversation():
    begun = [*ASKED, {"role": "assistant", "content": "<think>"}]
    said = [{"role": "assistant", "content": "7"}, {"role": "user", "content": "sure?"}]
    assert with_answer(begun, said) == [*ASKED, {"role": "assistant", "content": "<think>7"}, said[1]]
    assert with_answer(ASKED, said) == [*ASKED, *said] and with_answer("a", []) == [{"role": "user", "content": "a"}]


def test_a_text_is_asked_by_the_template_or_as_it_is(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [{"question": "ab", "answer": "7"}])
    caplog.set_level("INFO", "paddock")
    (row,) = dataset(path).rows([0])
    assert byte_tokenizer().decode(row.tokens) == "<|user|>ab<|end|><|assistant|>"
    assert "asked as messages of the user's, by the chat template (data.apply_chat_template)" in caplog.text
    caplog.clear()
    (row,) = dataset(path, apply_chat_template=False).rows([0])
    assert byte_tokenizer().decode(row.tokens) == "ab" == row.messages
    assert "asked as plain texts (data.apply_chat_template)" in caplog.text
    (row,) = dataset(write(tmp_path / "b.jsonl", [record("ab")]), apply_chat_template=False).rows([0])
    assert byte_tokenizer().decode(row.tokens) == "ab", "what the only message says, as forks of verl have it"
    two = write(tmp_path / "c.jsonl", [record("ab", prompt=[{"role": "system", "content": "s"}, *ASKED])])
    with pytest.raises(UserError, match="holds 2 messages"):
        dataset(two, apply_chat_template=False).rows([0])


SHAREGPT = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "7"}]


@pytest.mark.parametrize("row", [
    {"conversations": SHAREGPT},
    {"conversations": SHAREGPT[:1], "solution": "7"},
    {"conversations": SHAREGPT, "solution": "7"},
    [{"from": "human", "value": "ab"}, {"from": "assistant", "ground_truth": {"value": "7"}}],
    {"instruction": "ab", "input": "", "output": "7"},
], ids=["sharegpt", "question", "both", "lists", "alpaca"])  # fmt: skip
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_public_forms_of_rows_are_read(tmp_path, row, name):
    path = tmp_path / name
    path.write_text(json.dumps([row]) if name == "a.json" else json.dumps(row) + "\n")
    (found,) = dataset(str(path)).rows([0])
    assert (found.ground_truth, found.messages) == ("7", [{"role": "user", "content": "ab"}])
    if isinstance(row, dict) and "solution" not in row:
        (learnt,) = AnswerDataset(str(path), byte_tokenizer(), DataConfig(), key="data.train_files").rows([0])
        assert byte_tokenizer().decode(learnt.ground_truth[:-1]) == "7"


@pytest.mark.parametrize(("text", "reason"), [("[1, 2]", "row 0 is no object: 1"), ('{"a": 1}', "it holds no list")])
def test_json_of_another_shape_is_refused_with_the_shape_that_is_read(tmp_path, text, reason):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=reason) as error:
        dataset(str(tmp_path / "a.json"))
    assert '[{"prompt": "...", "answer": "..."}, ...]' in error.value.fix


def test_a_file_in_another_encoding_names_the_command_that_mends_it(tmp_path):
    (tmp_path / "a.csv").write_bytes("question,answer\nwie gehts schön,7\n".encode("latin1"))
    with pytest.raises(UserError, match="utf-8") as error:
        dataset(str(tmp_path / "a.csv"))
    assert "iconv -f latin1 -t utf8 a.csv" in error.value.fix
