"""Tool calls in the formats of model families: read as written, told what is wrong, and never an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.environments.calls import FORMATS, OTHER_NAMES, Format, format_of
from paddock.environments.environment import Call
from paddock.errors import UserError

TEXTUAL = ("qwen3_coder", "glm45")  # values are texts in these: the tool's schema says what they are
TWO = [Call("add", {"a": 1, "b": [2, 3.5]}), Call("say", {"text": 'Grüße, "世界"\n{}', "loud": True})]


def same(read: list[Call], meant: list[Call], form: Format) -> bool:
    def values(call: Call) -> dict:
        if form.name not in TEXTUAL:
            return dict(call.arguments)
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in call.arguments.items()}

    return [(one.name, dict(one.arguments)) for one in read] == [(one.name, values(one)) for one in meant]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("calls", [TWO[:1], TWO, [Call("now", {})]], ids=["one", "two", "no arguments"])
def test_what_is_rendered_is_read_as_it_was_meant(form, calls):
    read, malformed = form.parse(form.render(calls))
    assert malformed == [] and same(read, calls, form)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "text", ["", "The answer is 4.", '{"name": "Ada", "age": 36}', "[1, 2]", "a < b, c > d", "f(1)"]
)
def test_text_without_a_call_has_none(form, text):
    assert form.parse(text) == ([], [])


WRITTEN = {
    "hermes": '<think>use add</think>Sure.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "qwen3_coder": "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    "pythonic": "<|python_start|>[add(a=1)]<|python_end|>",
    "mistral": ' [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "glm45": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "gpt_oss": "<|channel|>analysis<|message|>use add<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1}',
    "phi4": 'functools[{"name": "add", "arguments": {"a": 1}}]',
    "granite": '<tool_call>[{"name": "add", "arguments": {"a": 1}}]',
}


@pytest.mark.parametrize(("name", "text"), WRITTEN.items(), ids=WRITTEN)
def test_calls_are_read_in_the_other_form_of_a_family_too(name, text):
    calls, malformed = FORMATS[name].parse(text)
    assert malformed == [] and same(calls, [Call("add", {"a": 1})], FORMATS[name])


def test_mistrals_calls_have_the_ids_that_the_policy_gave_them():
    mistral = FORMATS["mistral"]
    listed = mistral.render([Call("add", {"a": 1}, "abcdefghi"), Call("now", {}, "123456789")])
    named = '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}'
    for text in (listed, named):
        assert [call.id for call in mistral.parse(text)[0]] == ["abcdefghi", "123456789"]
    assert mistral.parse('[TOOL_CALLS]add[ARGS]{"a": 1}')[0] == [Call("add", {"a": 1})]


MALFORMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "is not closed by </tool_call>"),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "the JSON cannot be read"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', 'no "name"'),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "arguments of add are a list, not an object",
    ),
    ("hermes", '<tool_call>["add"]</tool_call>', "this is a list"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogate"),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "the JSON cannot be read"),
    ("hermes", f"<tool_call>{'9' * 10_000}</tool_call>", "the JSON cannot be read"),
    ("qwen3_coder", "<tool_call>add(1)</tool_call>", "no <function=NAME>"),
    ("qwen3_coder", "<function=add><parameter=a>1</function>", "not closed by </parameter>"),
    ("qwen3_coder", "<function=></function>", "names no tool"),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {', "the JSON cannot be read"),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}', "the JSON cannot be read"),
    ("pythonic", "[add(1)]", "must be named"),
    ("pythonic", "[add(a=b)]", "written out"),
    ("pythonic", "[add(a=1)", "cannot be read"),
    ("pythonic", "[add(a=1)] and so on", "nothing behind it"),
    ("mistral", "[TOOL_CALLS]add[ARGS]{a: 1}", "the arguments of add"),
    ("mistral", "[TOOL_CALLS]", "names no tool"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>", "there is no <｜tool▁sep｜>"),
    ("glm45", "<tool_call>add<arg_key>a</arg_key></tool_call>", "arguments cannot be read"),
    ("gpt_oss", "<|channel|>commentary to=functions.add <|constrain|>json", "no <|message|>"),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>{", "the arguments of add"),
    ("phi4", '<|tool_call|>[{"name": "add"}]', "not closed by <|/tool_call|>"),
    ("granite", "<|tool_call|>add(1)", "the JSON cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_call_that_cannot_be_read_says_why(name, text, reason):
    calls, (malformed, *others) = FORMATS[name].parse(text)
    assert calls == [] and others == [] and reason in malformed.reason
    assert malformed.text


def test_a_bad_call_leaves_the_good_ones_beside_it():
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    calls, malformed = FORMATS["hermes"].parse(f"{good}<tool_call>{{</tool_call>{good}")
    assert len(calls) == 2 and len(malformed) == 1


@pytest.mark.parametrize("opened", ["<think>", ""], ids=["opened by the policy", "opened by the generation prompt"])
def test_what_stands_in_thinking_is_no_call(opened):
    call = '<tool_call>{"name": "add"}</tool_call>'
    assert FORMATS["hermes"].parse(f"{opened}I could write {call}</think>No.") == ([], [])
    assert FORMATS["hermes"].parse(f"{opened}hm</think>{call}")[0] == [Call("add", {})]
    assert FORMATS["hermes"].parse(f"<think>cut off in {call}") == ([], [])


def test_arguments_that_were_quoted_are_read():
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert FORMATS["hermes"].parse(text)[0] == [Call("add", {"a": 1})]


PIECES = sorted({piece for text in [*WRITTEN.values(), *(text for _, text, _ in MALFORMED if len(text) < 200)]
                 for piece in (text, text[: len(text) // 2], text[len(text) // 2 :], text[:12])})  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from(PIECES)), max_size=6).map("".join))
def test_no_text_raises_whatever_the_format(text):
    for form in FORMATS.values():
        calls, malformed = form.parse(text)
        assert all(call.name and isinstance(call.arguments, dict) for call in calls)
        assert all(one.reason for one in malformed)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("hermes", "hermes"), ("gpt-oss", "gpt_oss"), ("qwen3_coder", "qwen3_coder"), ("llama3_json", "llama3_json"),
     ("Qwen25", "hermes"), ("deepseekv3", "deepseek_v3"), ("phi4_mini_json", "phi4"), ("glm45", "glm45")],
)  # fmt: skip
def test_names_of_other_systems_are_known(name, meant):
    assert format_of(name, None) is FORMATS[meant]
    assert set(OTHER_NAMES.values()) <= set(FORMATS)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"multi_turn.format=herms: no such format") as error:
        format_of("herms", None)
    assert "hermes" in error.value.fix


def test_without_a_name_or_a_sign_in_the_template_the_format_is_hermes():
    assert format_of(None, None) is format_of(None, "{{ messages[0].content }}") is FORMATS["hermes"]
    assert format_of(None, "... [TOOL_CALLS] ...").name == "mistral"
