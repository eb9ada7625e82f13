"""What stands between two turns of the policy is what the template writes, behind the tokens that were drawn."""

from __future__ import annotations

import json
import re

import pytest
from byte_tokenizer import byte_tokenizer

from paddock.commands.keys_of import SFT
from paddock.data.chat import PromptEncoder
from paddock.data.dialogue import TEMPLATE_KEY, Dialogue
from paddock.data.unscored import AnswerDataset
from paddock.environments.calls import FORMATS
from paddock.environments.environment import Call
from paddock.errors import UserError
from tests.templates.families import FAMILIES, Family

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
ASKED = [{"role": "user", "content": "What is 12 + 34?"}]
MORE = [{"role": "user", "content": "And 你好 🙂 twice?"}]
RESULT = {"role": "tool", "name": "add", "content": '{"sum": 46}', "tool_call_id": "abcdefghi"}
WITH_TOOL_ROLE = [family for family in FAMILIES.values() if family.tool_role]


def ids(families) -> dict:
    families = list(families)
    return {"argvalues": families, "ids": [family.name for family in families]}


def tools_of(family: Family) -> list | None:
    return TOOLS if family.calls else None


def end_of(dialogue: Dialogue, said: list, tools: list | None = None) -> int:
    """The stop token that the template ends a turn with before these messages."""
    return dialogue.extension(said, [], tools)[0]


def whole(dialogue: Dialogue, messages: list, tools: list | None, generation: bool = True) -> str:
    return dialogue.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generation
    )


# gpt-oss draws a channel's header, Command A marks, and Llama 2 and Nemotron spaces around an answer, as tokens of it
DRAWN = {"gpt_oss": "<|channel|>final<|message|>It is 46.", "llama2": " It is 46. ", "nemotron_nano2": "It is 46.\n",
         "command_a": "<|START_RESPONSE|>It is 46.<|END_RESPONSE|>"}  # fmt: skip


@pytest.mark.parametrize("family", **ids(FAMILIES.values()))
@pytest.mark.parametrize("cut", [False, True], ids=["ended", "cut"])
def test_prompt_answer_and_extension_are_the_conversation_as_the_template_writes_it(family, cut):
    dialogue, tools = family.dialogue(), tools_of(family)
    drawn = dialogue.tokenizer(DRAWN.get(family.name, "It is 46."), add_special_tokens=False)["input_ids"]
    end = end_of(dialogue, MORE, tools)
    answer = drawn if cut or end not in dialogue.stops else [*drawn, end]
    tokens = dialogue.prompt(ASKED, tools) + answer + dialogue.extension(MORE, answer, tools)
    text = whole(dialogue, [*ASKED, {"role": "assistant", "content": "It is 46."}, *MORE], tools)
    found = dialogue.text(tokens)
    if family.name == "mistral_nemo":  # moves the tools to the last question
        start, _, behind = text.partition("[AVAILABLE_TOOLS]")
        shown, _, behind = behind.partition("[/AVAILABLE_TOOLS]")
        text = start.replace("[INST]", f"[AVAILABLE_TOOLS]{shown}[/AVAILABLE_TOOLS][INST]") + behind
    if family.name == "deepseek_r1":  # opens thinking for a turn, and takes it out of the turn again
        text = text.replace("<｜Assistant｜>It", "<｜Assistant｜><think>\nIt")
    if family.name == "minimax_m2":  # the same
        text = text.replace("]~b]ai\nIt", "]~b]ai\n<think>\nIt")
    if family.name == "glm45":  # adds an empty thinking block that was not drawn
        text = text.replace("\n<think></think>\nIt", "It")
    assert found == text


@pytest.mark.parametrize("family", **ids(family for family in WITH_TOOL_ROLE if family.calls))
@pytest.mark.parametrize("count", [1, 2])
def test_results_of_tools_stand_behind_calls_as_the_template_writes_them(family, count):
    dialogue = family.dialogue()
    results = [RESULT | {"content": f"result {number}", "tool_call_id": f"call0000{number}"} for number in range(count)]
    extension = dialogue.text(dialogue.extension(results, [], TOOLS))
    functions = [{"id": one["tool_call_id"], "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
                 for one in results]  # fmt: skip
    calls = functions[:1] if family.name in ("llama31", "gpt_oss") else functions
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = whole(dialogue, [{"role": "system", "content": "Be kind."}, *ASKED, turn, *results], TOOLS)
    assert text.endswith(extension) and extension.count("result") >= count
    assert dialogue.extension(results, [], TOOLS)[0] in dialogue.stops


def test_the_line_break_behind_the_end_of_a_turn_is_not_lost():
    dialogue = FAMILIES["qwen25"].dialogue()
    end = dialogue.tokenizer.convert_tokens_to_ids("<|im_end|>")
    drawn = dialogue.extension(MORE, [5, end])
    assert dialogue.text(drawn).startswith("\n<|im_start|>user\n")
    assert dialogue.extension(MORE, [5]) == [end, *drawn]


def test_an_end_of_text_that_ends_no_turn_is_followed_by_the_end_of_the_turn():
    dialogue = FAMILIES["qwen25"].dialogue()
    other = dialogue.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert dialogue.extension(MORE, [5, other]) == dialogue.extension(MORE, [5])


@pytest.mark.parametrize(
    ("name", "drawn", "said", "starts"),
    [
        ("llama31", "<|eom_id|>", [RESULT], "<|start_header_id|>ipython"),
        ("gpt_oss", "<|return|>", MORE, "<|start|>user"),
        ("gpt_oss", "<|call|>", [RESULT], "<|start|>functions.add to=assistant"),
        ("gpt_oss", "<|call|>", MORE, "<|start|>user"),
        ("glm45", "<|observation|>", [RESULT], "\n<tool_response>"),
        ("glm45", "<|user|>", [RESULT], "<|observation|>\n<tool_response>"),  # a header is never left out
        ("glm45", "<|endoftext|>", MORE, "<|user|>\n"),
        ("phi4_mini", "<|endoftext|>", MORE, "<|end|><|user|>"),
    ],
)
def test_any_end_of_a_turn_that_the_family_has_ends_it_once(name, drawn, said, starts):
    dialogue = FAMILIES[name].dialogue()
    token = dialogue.tokenizer.convert_tokens_to_ids(drawn)
    assert token in dialogue.stops
    assert dialogue.text(dialogue.extension(said, [5, token])).startswith(starts)


def test_tools_that_the_prompt_has_are_not_repeated_behind_a_question():
    dialogue = FAMILIES["mistral_nemo"].dialogue()
    assert "[AVAILABLE_TOOLS]" in dialogue.text(dialogue.prompt(ASKED, TOOLS))
    assert dialogue.text(dialogue.extension(MORE, [], TOOLS)) == f"</s>[INST]{MORE[0]['content']}[/INST]"


@pytest.mark.parametrize("identity", ["1", "far too long an id", "ünïcödé!!", ""])
def test_an_id_that_the_template_refuses_ends_no_run(identity):
    """The policy writes ids of calls, and may write any."""
    dialogue = FAMILIES["mistral_nemo"].dialogue()
    text = dialogue.text(dialogue.extension([RESULT | {"tool_call_id": identity}], [], TOOLS))
    assert '{"sum": 46}' in text and text.endswith("[/TOOL_RESULTS]")
    assert "abcdefghi" in dialogue.text(dialogue.extension([RESULT], [], TOOLS))


@pytest.mark.parametrize("content", ["~answer~", "~said 0~", "<|im_end|>", "\ud800", "", "{% raw %}", "a" * 100_000])
def test_a_result_may_hold_any_text(content):
    dialogue = FAMILIES["qwen3"].dialogue()
    text = dialogue.text(dialogue.extension([RESULT | {"content": content}, RESULT], [5], TOOLS))
    shown = content.replace("\ud800", "?")
    assert text == f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{shown}\n</tool_response>\n<tool_response>\n" + (
        '{"sum": 46}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )


@pytest.mark.parametrize(
    ("name", "said", "reason", "fix"),
    [
        ("gemma2", [RESULT], "roles: tool|behind an answer: tool", "role user"),
        ("llama2", [RESULT], "must alternate", "role user"),
        ("gemma2", [{"role": "system", "content": "x"}], "must alternate", "role user"),
        ("gemma2", [*MORE, *MORE], "must alternate", "in one message"),
        ("deepseek_v31", [{"role": "system", "content": "x"}], "elsewhere than behind the answer", "role user"),
    ],
)
def test_roles_that_a_template_cannot_write_are_refused_with_the_key(name, said, reason, fix):
    with pytest.raises(UserError, match=reason) as error:
        FAMILIES[name].dialogue().extension(said, [5])
    assert error.value.key == TEMPLATE_KEY and fix in error.value.fix


def test_a_role_that_a_template_leaves_out_is_refused():
    """A template that writes the roles it knows, and drops others without a word."""
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    dialogue = Dialogue(PromptEncoder(tokenizer), frozenset({tokenizer.eos_token_id}))
    with pytest.raises(UserError, match="writes the content of role 'tool' nowhere"):
        dialogue.extension([RESULT], [5])
    assert dialogue.text(dialogue.extension(MORE, [5])).startswith("<|end|><|user|>And")


def test_without_a_template_messages_cannot_follow():
    tokenizer = byte_tokenizer(None)
    dialogue = Dialogue(PromptEncoder(tokenizer), frozenset({tokenizer.eos_token_id}))
    with pytest.raises(UserError, match="no chat template"):
        dialogue.extension(MORE, [5])


def test_a_plain_prompt_goes_on_with_plain_contents():
    tokenizer = byte_tokenizer(None)
    dialogue = Dialogue(PromptEncoder(tokenizer), frozenset({tokenizer.eos_token_id}))
    assert dialogue.text(dialogue.prompt("2+2=")) == "2+2="
    said = [{"role": "user", "content": "No. "}, {"role": "user", "content": "Again: "}]
    assert dialogue.text(dialogue.extension(said, [5, tokenizer.eos_token_id], plain=True)) == "No. Again: "


def test_a_template_of_its_own_for_tools_is_used_where_there_are_tools():
    tokenizer = FAMILIES["hermes"].tokenizer()
    tokenizer.chat_template = {"default": FAMILIES["smollm2"].template, "tool_use": FAMILIES["hermes"].template}
    dialogue = Dialogue(PromptEncoder(tokenizer), frozenset({tokenizer.eos_token_id}))
    assert "<tool_response>" in dialogue.text(dialogue.extension([RESULT], [], TOOLS))
    assert "<|im_start|>tool\n{" in dialogue.text(dialogue.extension([RESULT], []))


def test_a_template_named_in_the_config_is_the_one_that_is_used():
    tokenizer = FAMILIES["qwen25"].tokenizer()
    encoder = PromptEncoder(tokenizer, {"chat_template": "{% for m in messages %}{{ m.content }}|{% endfor %}>"})
    dialogue = Dialogue(encoder, frozenset({tokenizer.eos_token_id}))
    assert dialogue.text(dialogue.extension(MORE, [])) == f"|{MORE[0]['content']}|>"


# Data: conversations for a warm start

FUNCTION = {"name": "add", "arguments": {"a": 12, "b": 34}}
CONVERSATION = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": FUNCTION}]},
    RESULT,
    {"role": "assistant", "content": "It is 46."},
    *MORE,
    {"role": "assistant", "content": "It is 92."},
]


def conversation_of(family: Family) -> list:
    """Calls are in the content where a template writes none."""
    if not family.calls:
        return [message for message in CONVERSATION if message["role"] != "tool" and "tool_calls" not in message]
    if family.writes_calls:
        return CONVERSATION
    written = FORMATS[family.calls].render([Call("add", FUNCTION["arguments"])])
    return [ASKED[0], {"role": "assistant", "content": written}, *CONVERSATION[2:]]


@pytest.mark.parametrize("family", **ids(FAMILIES.values()))
def test_data_holds_what_a_rollout_would_that_drew_the_assistants_turns(family):
    dialogue, tools = family.dialogue(), tools_of(family)
    spans = dialogue.spans(conversation_of(family), tools)
    assert [author for _, author in spans] == [bool(number % 2) for number in range(len(spans))]
    assert spans[0][0] == dialogue.prompt(ASKED, tools)
    following = [[RESULT], MORE] if family.calls else [MORE]
    for (drawn, _), (between, _), said in zip(spans[1::2], spans[2::2], following, strict=False):
        assert drawn[-1] in dialogue.stops
        assert between == dialogue.extension(said, drawn, tools)
    assert spans[-1][0][-1] in dialogue.stops and spans[-1][1]


@pytest.mark.parametrize("family", **ids(family for family in WITH_TOOL_ROLE if family.calls))
def test_calls_in_data_are_read_by_the_format_of_the_family(family):
    dialogue = family.dialogue()
    (_, (drawn, _), *_) = dialogue.spans(conversation_of(family), TOOLS)
    (call,), malformed = FORMATS[family.calls].parse(dialogue.text(drawn[:-1]))
    assert not malformed and call.name == "add" and {key: int(value) for key, value in call.arguments.items()} == {
        "a": 12, "b": 34}  # fmt: skip


AS_WRITTEN = ["qwen25", "qwen3_coder", "glm45", "deepseek_v32", "kimi_k2", "minimax_m2", "command_a", "seed_oss",
              "hunyuan_a13b", "internlm2", "nemotron_nano2", "olmo3"]  # fmt: skip


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_calls_are_rendered_as_the_template_of_the_family_writes_them(name):
    dialogue, form = FAMILIES[name].dialogue(), FORMATS[str(FAMILIES[name].calls)]
    calls = [Call("add", {"a": number, "b": "twelve"}, f"functions.add:{number}") for number in range(2)]
    functions = [{"id": one.id, "type": "function", "function": {"name": one.name, "arguments": dict(one.arguments)}}
                 for one in calls]  # fmt: skip
    drawn = dialogue.spans([*ASKED, {"role": "assistant", "content": "", "tool_calls": functions}], TOOLS)[1][0]
    rendered = form.render(calls)
    if name == "hunyuan_a13b":  # ids are written by others of the format
        rendered = re.sub(r', "id": "[^"]*"', "", rendered)
    assert dialogue.text(drawn[:-1]).strip() == rendered


@pytest.mark.parametrize("family", **ids(family for family in FAMILIES.values() if not family.writes_calls))
def test_calls_that_a_template_would_drop_are_refused(family):
    with pytest.raises(UserError, match="does not write the assistant's tool calls"):
        family.dialogue().spans(CONVERSATION, TOOLS)


def test_arguments_that_are_json_texts_become_objects_where_the_template_writes_objects():
    dialogue = FAMILIES["qwen25"].dialogue()
    function = {"name": "add", "arguments": '{"a": 12, "b": 34}'}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    drawn = dialogue.spans([*ASKED, turn], TOOLS)[1][0]
    assert FORMATS["hermes"].parse(dialogue.text(drawn[:-1]))[0] == [Call("add", {"a": 12, "b": 34})]


@pytest.mark.parametrize(
    ("name", "content", "drawn"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nYes", "<think>\nhm\n</think>\n\nYes<|im_end|>"),
        ("qwen3", "Yes", "Yes<|im_end|>"),
        ("qwen25", "a<|im_start|>", "a<|im_start|><|im_end|>"),
        ("deepseek_r1", "<think>\nhm</think>Yes", "hm</think>Yes<｜end▁of▁sentence｜>"),
        ("gpt_oss", "Yes", "<|channel|>final<|message|>Yes<|return|>"),
        ("llama2", "Yes", " Yes </s>"),
        ("command_a", "Yes", "<|START_RESPONSE|>Yes<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("command_a", "Yes<|END_RESPONSE|>", "<|START_RESPONSE|>Yes<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("nemotron_nano2", "Yes", "Yes\n<SPECIAL_12>"),
        ("glm45", "Yes", "Yes<|user|>"),
    ],
)
def test_a_turn_of_data_stands_behind_the_generation_prompt_as_the_template_writes_it(name, content, drawn):
    """What the prompt has opened is not written twice, thinking stays as it is, and a mark of the family's before the
    end of the turn is written once."""
    dialogue = FAMILIES[name].dialogue()
    spans = dialogue.spans(
        [*ASKED, {"role": "assistant", "content": content}, *MORE, {"role": "assistant", "content": "No"}]
    )
    assert dialogue.text(spans[1][0]) == drawn


@pytest.mark.parametrize(
    ("name", "kwargs", "starts"),
    [
        ("qwen3", {}, "<tool_call>"),
        ("qwen3", {"enable_thinking": False}, "<tool_call>"),
        ("glm45", {}, "<tool_call>"),
        ("deepseek_v31", {}, "<｜tool▁calls▁begin｜>"),
        ("deepseek_r1", {}, "<｜tool▁calls▁begin｜>"),
    ],
)
def test_a_call_of_data_without_thinking_has_none(name, kwargs, starts):
    """Templates add an empty thinking block to the last turn; turns with a content alone have none either."""
    dialogue = FAMILIES[name].dialogue(**kwargs)
    assert dialogue.text(dialogue.spans(CONVERSATION)[1][0]).startswith(starts)


@pytest.mark.parametrize(
    ("name", "end"), [("gpt_oss", "<|call|>"), ("glm45", "<|observation|>"), ("qwen25", "<|im_end|>")]
)
def test_a_conversation_that_ends_with_a_call_ends_as_the_family_ends_calls(name, end):
    dialogue = FAMILIES[name].dialogue()
    assert dialogue.text(dialogue.spans(CONVERSATION[:2], TOOLS)[-1][0]).endswith(end)


def test_thinking_in_a_field_of_its_own_is_written_by_the_template_or_refused():
    turn = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    drawn = FAMILIES["qwen3"].dialogue().spans([*ASKED, turn])[1][0]
    assert FAMILIES["qwen3"].dialogue().text(drawn) == "<think>\nhm\n</think>\n\nYes<|im_end|>"
    with pytest.raises(UserError, match="tool calls or thinking"):
        FAMILIES["qwen25"].dialogue().spans([*ASKED, turn])


def test_a_conversation_without_an_answer_is_refused():
    dialogue = FAMILIES["qwen25"].dialogue()
    for messages in (ASKED, [{"role": "assistant", "content": "Hello"}, *ASKED]):
        with pytest.raises(UserError, match="assistant"):
            dialogue.spans(messages)


@pytest.mark.parametrize("turns", [1, 2])
def test_tools_of_a_row_are_told_to_a_conversation_of_one_turn_as_to_one_of_several(turns, tmp_path):
    tokenizer, answer = FAMILIES["qwen25"].tokenizer(), {"role": "assistant", "content": "It is 46."}
    said = [*ASKED, answer, *([*MORE, answer] if turns == 2 else [])]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": said, "tools": json.dumps(TOOLS)}) + "\n")
    data = SFT.load([f"data={rows}", "model=x", "data.max_prompt_length=4096"]).config.data
    (row,) = AnswerDataset.train(data, tokenizer).rows([0])
    assert row.tokens == FAMILIES["qwen25"].dialogue().prompt(ASKED, TOOLS)


def written(path, *conversations):
    """Returns a data set of conversations and its tokenizer."""
    tokenizer = FAMILIES["qwen25"].tokenizer()
    path.write_text("".join(json.dumps({"messages": said}) + "\n" for said in conversations))
    data = SFT.load([f"data={path}", "model=x", "data.max_prompt_length=4096", "data.filter_overlong_prompts=False"])
    return AnswerDataset.train(data.config.data, tokenizer), tokenizer


def test_only_what_stands_before_the_first_answer_is_rendered_as_a_prompt(tmp_path, monkeypatch):
    """Not the history before the last answer as well, which is most of a long conversation."""
    answer = {"role": "assistant", "content": "It is 46."}
    rows, _ = written(tmp_path / "rows.jsonl", [*ASKED, answer, *ASKED, answer], [*ASKED, answer])
    asked, encode = [], PromptEncoder.encode
    monkeypatch.setattr(
        PromptEncoder, "encode", lambda self, prompts, *where: [asked.extend(prompts), encode(self, prompts, *where)][1]
    )
    first, second = rows.rows([0, 1])
    assert asked == [ASKED, ASKED] and first.tokens == second.tokens


def test_a_conversation_that_the_template_refuses_is_named_by_its_row(tmp_path):
    answer = {"role": "assistant", "content": "It is 46."}
    strange = {"role": "referee", "content": "Stop."}
    rows, tokenizer = written(tmp_path / "rows.jsonl", [*ASKED, answer], [*ASKED, answer, strange, answer])
    refusing = "{{ raise_exception('no such role') if message.role == 'referee' }}"
    tokenizer.chat_template = (
        f"{{% for message in messages %}}{refusing}{{{{ message.content }}}}<|im_end|>{{% endfor %}}"
    )
    with pytest.raises(UserError, match=r"rows.jsonl.*row 1.*column 'messages'.*no such role"):
        rows.rows([0, 1])
