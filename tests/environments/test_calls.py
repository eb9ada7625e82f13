"""Tool calls in the formats of model families: read as written, told what is wrong, and never an exception."""

from __future__ import annotations

import json
import re
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.environments.calls import FORMATS, OTHER_NAMES, Format, format_of
from paddock.environments.environment import Call
from paddock.errors import UserError
from tests.templates.families import FAMILIES

TEXTUAL = (
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "seed_oss",
    "step3",
)  # values are texts in these: the tool's schema says what they are
TWO = [Call("add", {"a": 1, "b": [2, 3.5]}), Call("say", {"text": 'Grüße, "世界"\n{}', "loud": True})]

KIMI = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
DSML = '<｜DSML｜{0}><｜DSML｜invoke name="add">{1}</｜DSML｜invoke></｜DSML｜{0}>'
STEP = "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>{}<｜tool_call_end｜><｜tool_calls_end｜>"


def same(read: list[Call], meant: list[Call], form: Format) -> bool:
    def written(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    def values(call: Call) -> dict:
        if form.name not in TEXTUAL:
            return dict(call.arguments)
        return {key: value if isinstance(value, str) else written(value) for key, value in call.arguments.items()}

    # as JSON, in which true is not 1
    found = [(one.name, written(dict(one.arguments))) for one in read]
    return found == [(one.name, written(values(one))) for one in meant]


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
    "deepseek_v31": "</think>Sure.<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": "Sure.\n\n"
    + DSML.format("function_calls", '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'),
    "deepseek_v4": DSML.format("tool_calls", '\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'),
    "kimi_k2": "Sure.<|tool_calls_section_begin|>" + KIMI.format('{"a": 1}') + "<|tool_calls_section_end|>",
    "minimax_m1": '<think>use add</think><tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n</tool_calls>',
    "minimax_m2": "hm</think>\n<minimax:tool_call>\n<invoke name='add'>\n<parameter name='a'>1</parameter>\n</invoke>\n"
    '</minimax:tool_call> or <invoke name="add"></invoke>',
    "seed_oss": "<seed:think>add</seed:think>\n<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n"
    "</function>\n</seed:tool_call>",
    "step3": STEP.format(
        '<steptml:invoke name="add"><steptml:parameter name="a">1</steptml:parameter></steptml:invoke>'
    ),
    "cohere_command3": '<|START_THINKING|>add<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
    '"tool_name": "add", "parameters": {"a": 1}}\n]<|END_ACTION|>',
    "command_r": 'Action: ```json\n[\n    {\n        "tool_name": "add",\n        "parameters": {"a": 1}\n    }\n]```',
    "nemotron_json": '<think>\nadd\n</think>\n\n<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>',
    "internlm": 'Sure.<|action_start|> <|plugin|>\n{"name": "add", "parameters": {"a": 1}}<|action_end|>',
    "hunyuan_a13b": '<tool_calls>[{"name": "add", "arguments": {"a": 1}}]</tool_calls>\nThat is all.',
    "functiongemma": "<start_function_call>call:add{ a: 1 }<end_function_call>",
    "gemma4": "<|channel>thought\nadd\n<channel|><|tool_call>call:add{a:1}<tool_call|>",
    "olmo3": "Sure.\n<function_calls>\n  add(a=1)\n</function_calls>",
    "lfm2": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>I add.",
    "xlam": 'Sure.\n```json\n[{"name": "add", "arguments": {"a": 1}}]\n```',
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


def test_kimis_calls_have_the_ids_that_their_results_are_told_with():
    kimi = FORMATS["kimi_k2"]
    written = kimi.render([Call("add", {"a": 1}, "functions.add:7"), Call("mcp.now", {}, "other")])
    assert [(call.name, call.id) for call in kimi.parse(written)[0]] == [
        ("add", "functions.add:7"), ("mcp.now", "functions.mcp.now:1")]  # fmt: skip


@pytest.mark.parametrize("name", ["cohere_command3", "hunyuan_a13b"])
def test_calls_keep_ids_where_the_format_has_them(name):
    calls = [Call("add", {"a": 1}, "one"), Call("now", {}, "two")]
    assert FORMATS[name].parse(FORMATS[name].render(calls))[0] == calls


def test_command_rs_word_that_no_tool_is_needed_is_no_call():
    answers = FORMATS["command_r"].render([Call("directly-answer", {}), Call("add", {"a": 1})])
    assert FORMATS["command_r"].parse(answers) == ([Call("add", {"a": 1})], [])


@pytest.mark.parametrize("value", ["true", "True", "null", "None", '[null, {"k": false}]'])
def test_olmos_calls_have_values_of_python_and_of_json(value):
    (call,), malformed = FORMATS["olmo3"].parse(f"<function_calls>f(a={value})</function_calls>")
    meant = {"true": True, "True": True, "null": None, "None": None}.get(value, [None, {"k": False}])
    assert malformed == [] and call.arguments == {"a": meant}


def test_gemmas_calls_have_bare_and_nested_values():
    text = '<|tool_call>call:f{a:-1.5, b:[true,<|"|>x, y<|"|>],<|"|>c d<|"|>:{k:None,l:bare words}}<tool_call|>'
    (call,), malformed = FORMATS["gemma4"].parse(text)
    assert malformed == [] and call.arguments == {"a": -1.5, "b": [True, "x, y"], "c d": {"k": None, "l": "bare words"}}


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
    *(
        ("pythonic", f"[add(a={value})]", "must be numbers, texts, lists or dictionaries")
        for value in ("{1, 2}", "b'x'", "1j", "...", "{(1, 2): 3}", "'\\ud800'")
    ),
    ("lfm2", "<|tool_call_start|>[add(a={1})]<|tool_call_end|>", "must be numbers"),
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
    ("deepseek_v31", "<｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>", "there is no <｜tool▁sep｜>"),
    ("deepseek_v31", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>", "names no tool"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{} x<｜tool▁call▁end｜>", "Extra data"),
    ("kimi_k2", KIMI.format("{"), "write <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>"),
    ("kimi_k2", KIMI.format("[]"), "the arguments of add are a list"),
    ("kimi_k2", KIMI.format("{}").replace("functions.add:", ""), "'0' is no name of a tool"),
    ("kimi_k2", KIMI.format("{}").removesuffix("<|tool_call_end|>"), "is not closed by <|tool_call_end|>"),
    ("deepseek_v32", "<｜DSML｜function_calls>add(1)</｜DSML｜function_calls>", "there is no <｜DSML｜invoke>"),
    (
        "deepseek_v32",
        DSML.format("function_calls", '<｜DSML｜parameter name="a" string="false">x</｜DSML｜parameter>'),
        "the argument a of add: the JSON cannot be read",
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="add"><parameter name="a">1</invoke></minimax:tool_call>',
        'write <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>',
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter>', "closed by </invoke>"),
    ("seed_oss", "<seed:tool_call><function=></function></seed:tool_call>", "names no tool"),
    ("seed_oss", "<seed:tool_call></seed:tool_call>", "write <seed:tool_call><function=NAME><parameter=KEY>VALUE"),
    ("step3", STEP.format("add(1)"), "there is no <steptml:invoke>"),
    ("cohere_command3", '<|START_ACTION|>[{"name": "add"}]<|END_ACTION|>', 'no "tool_name"'),
    ("cohere_command3", '<|START_ACTION|>[{"tool_name": "add", "parameters": {}}]', "not closed by <|END_ACTION|>"),
    ("command_r", "Action:\n```json\nadd(1)```", "write Action: and a block ```json"),
    ("nemotron_json", "<TOOLCALL>add(1)</TOOLCALL>", "the JSON cannot be read"),
    ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>", "there is no call in it"),
    ("hunyuan_a13b", "<tool_calls>[1]</tool_calls>", "this is a number"),
    ("minimax_m1", '<tool_calls>\n{"name": "add"', "not closed by </tool_calls>"),
    ("internlm", "<|action_start|><|plugin|>\n{'name': 'add'}<|action_end|>", "the JSON cannot be read"),
    ("functiongemma", "<start_function_call>add(1)<end_function_call>", "no call:NAME{...}"),
    ("functiongemma", "<start_function_call>call:add{a:<escape>1}<end_function_call>", "not closed by <escape>"),
    ("functiongemma", f"<start_function_call>call:add{{a:{'[' * 100_000}<end_function_call>", "nested too deep"),
    ("gemma4", "<|tool_call>call:add{a:1,}b}<tool_call|>", "no <tool_call|> behind it"),
    ("gemma4", "<|tool_call>call:add{1}<tool_call|>", "an argument has no KEY:"),
    ("gemma4", "<|tool_call>call:add{a:}<tool_call|>", "a value is missing"),
    ("olmo3", "<function_calls>add(1)</function_calls>", "must be named"),
    ("olmo3", "<function_calls>x = 1</function_calls>", "this is no call"),
    ("olmo3", "<function_calls></function_calls>", "there is no call in it"),
    ("lfm2", "<|tool_call_start|>[add(a=1)<|tool_call_end|>", "the calls cannot be read"),
    ("lfm2", "<|tool_call_start|>[add(a=1)]", "is not closed by <|tool_call_end|>"),
    ("xlam", '[{"name": "add", "arguments": {"a": 1}', "the JSON cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "reason"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_call_that_cannot_be_read_says_why(name, text, reason):
    calls, (malformed, *others) = FORMATS[name].parse(text)
    assert calls == [] and others == [] and reason in malformed.reason
    assert malformed.text


UNQUOTED = ("minimax_m2", "seed_oss", "step3", "deepseek_v32", "deepseek_v4", "functiongemma", "gemma4")
"""Formats without a way to write their own marks inside of texts."""
CUT = ("qwen3_coder", "glm45", "gpt_oss", "mistral", "granite", "deepseek_v3")
"""Formats whose readers end a call at the first mark that closes it, or begin another at a mark, wherever it stands."""
LETTERS = st.characters(exclude_categories=["Cs"])
QUOTES = ['"', "'", "\\", "\\n", "\\'", '"}', "''", "\n"]


def marks_of(form: Format) -> list[str]:
    return sorted({*re.findall(r"<[^<>]+>", form.render(TWO)), "Action:\n```json", "```", "[", "]", "{", "}", ","})


def calls_with(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[Call]]:
    names = st.sampled_from(["a", "b_2", "longer_name"])
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | numbers | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=2),
        max_leaves=6,
    )
    calls = st.builds(Call, st.sampled_from(["add", "get_time"]), st.dictionaries(names, values, max_size=3))
    return st.lists(calls, min_size=1, max_size=3)


ANY_CALLS = calls_with(st.text(LETTERS, max_size=12) | st.sampled_from(QUOTES))


@cache
def calls_with_marks_of(form: Format) -> st.SearchStrategy[list[Call]]:
    """Kept for all examples: hypothesis takes longer to make such a strategy than to draw from it."""
    texts = st.tuples(st.text(LETTERS, max_size=3), st.sampled_from(marks_of(form)), st.text(LETTERS, max_size=3))
    return calls_with(texts.map("".join))


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@settings(max_examples=25, deadline=None)
@given(calls=ANY_CALLS)
def test_any_arguments_are_read_as_they_were_rendered(form, calls):
    read, malformed = form.parse(form.render(calls))
    assert malformed == [] and same(read, calls, form)


@pytest.mark.parametrize(
    "form", [form for name, form in FORMATS.items() if name not in CUT], ids=lambda form: form.name
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_marks_of_the_format_inside_of_texts_make_no_other_call(form, data):
    """They are text; where the format cannot write them, the call is malformed, never another one."""
    (call, *_) = data.draw(calls_with_marks_of(form))
    read, malformed = form.parse(form.render([call]))
    assert (malformed == [] and same(read, [call], form)) or (form.name in UNQUOTED and malformed and read == [])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_message_has_the_calls_apart_from_the_text_before_them(form):
    """For reward functions. Some families' calls are the whole turn, and gpt-oss marks what is content."""
    said = form.message(form.render(TWO), calls := form.parse(form.render(TWO))[0], opened=False)
    assert said["content"] == "" and [one["function"]["name"] for one in said["tool_calls"]] == ["add", "say"]
    assert same(calls, TWO, form) and said["tool_calls"][0]["function"]["arguments"] == calls[0].arguments
    marked = form.around[0] in form.render(TWO) and not form.content
    assert form.message(f"hm {form.render(TWO)}", calls, False)["content"] == ("hm" if marked else "")
    assert form.message(f"{form.content}It is 4.", [], False) == {"role": "assistant", "content": "It is 4."}


@pytest.mark.parametrize("begun", [True, False])
def test_a_message_has_its_thinking_apart(begun):
    text = f"{'' if begun else '<think>'}I could <tool_call></think>\n\n No. "
    found = {"role": "assistant", "content": "No.", "reasoning_content": "I could <tool_call>"}
    assert FORMATS["hermes"].message(text, [], opened=begun) == found
    assert FORMATS["lfm2"].message(text, [], opened=begun)["thinking"] == "I could <tool_call>"
    assert FORMATS["hermes"].message("<think>cut off", [], False)["content"] == ""


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


@pytest.mark.parametrize("name", ["cohere_command3", "seed_oss", "gemma4"])
def test_thinking_in_the_familys_own_marks_has_no_call(name):
    form = FORMATS[name]
    (opening, closing), call = form.thinking, form.render([Call("add", {"a": 1})])
    assert form.parse(f"{opening}I could write {call}{closing}No.") == ([], [])
    assert len(form.parse(f"hm{closing}{call}")[0]) == 1


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_marks_of_thinking_inside_of_a_text_are_text(form):
    opening, closing = form.thinking
    for said in (opening, closing, f"{opening}1{closing}", f"{closing} {opening}"):
        calls = [Call("add", {"a": said}), Call("add", {"a": "2"})]
        for before in ("", f"{opening}hm{closing}", f"hm{closing}"):
            read, malformed = form.parse(before + form.render(calls))
            assert malformed == [] and same(read, calls, form)


PIECES = sorted({piece for text in [*WRITTEN.values(), *(text for _, text, _ in MALFORMED if len(text) < 200)]
                 for piece in (text, text[: len(text) // 2], text[len(text) // 2 :], text[:12])})  # fmt: skip


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_marks_without_end_take_no_time(form):
    """A policy that repeats itself holds no run up."""
    marks = [*re.findall(r"<[^<>]+>", form.render(TWO)), "["]
    begun = time.process_time()
    for mark in (*marks, *(mark[:-1] for mark in marks[:-1]), "".join(marks[:-2]) + " "):
        form.parse(marks[0] + mark * (20_000 // len(mark)))
        form.parse(marks[0] + mark + " " * 20_000)
    assert time.process_time() - begun < 5


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
     ("Qwen25", "hermes"), ("deepseekv3", "deepseek_v3"), ("phi4_mini_json", "phi4"), ("glm45", "glm45"),
     ("deepseekv31", "deepseek_v31"), ("deepseek_v32", "deepseek_v32"), ("minimax-m2", "minimax_m2"),
     ("ernie45", "hermes"), ("step3p5", "qwen3_coder"), ("interns1", "internlm"), ("jamba", "hunyuan_a13b"),
     ("cohere_command4", "cohere_command3"), ("minimax", "minimax_m1")],
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


FRAGMENTS = {
    "hermes": "<tools>{{ tool | tojson }}</tools> within <tool_call></tool_call> tags",
    "qwen3_coder": "<tool_call>\\n<function=example><parameter=key>value</parameter></function>\\n</tool_call>",
    "llama3_json": "<|start_header_id|>{{ 'ipython' }}<|end_header_id|>",
    "pythonic": "<|header_start|>assistant<|header_end|><|python_start|>",
    "mistral": "[AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{}\\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "deepseek_v32": "set dsml = '｜DSML｜' ... '<' + dsml + 'function_calls>' ... message['tool_calls']",
    "deepseek_v4": "set dsml = '｜DSML｜' ... '<' + dsml + 'tool_calls>' ... <tool_result>",
    "glm45": "<tool_call>{name}\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>",
    "gpt_oss": "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>",
    "phi4": "<|system|>{{ content }}<|tool|>{{ tools }}<|/tool|><|end|>",
    "granite": "<|start_of_role|>assistant<|end_of_role|> <|tool_call|> followed by a list",
    "kimi_k2": "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>",
    "minimax_m1": "<beginning_of_sentence>ai name=assistant\\n<tool_calls>\\n",
    "minimax_m2": '<minimax:tool_call>\\n<invoke name="f">\\n<parameter name="k">v</parameter>',
    "seed_oss": "<seed:tool_call>\\n<function=f>\\n<parameter=k>v</parameter>\\n</function>\\n</seed:tool_call>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">',
    "cohere_command3": "Action: write <|START_ACTION|> ... <|END_ACTION|><|START_OF_TURN_TOKEN|>",
    "command_r": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>\\nAction:\\n```json\\n",
    "nemotron_json": '<AVAILABLE_TOOLS>[]</AVAILABLE_TOOLS> <TOOLCALL>[{"name": "f"}]</TOOLCALL>',
    "internlm": "<|im_start|>system name=<|plugin|>\\n",
    "hunyuan_a13b": '<|startoftext|> <tool_calls>[{"name": "f"}]</tool_calls> <tool_response>',
    "functiongemma": "<start_of_turn>model\\n<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>",
    "gemma4": "<|turn>model\\n<|tool_call>call:f{}<tool_call|>",
    "olmo3": "<functions></functions> ... within <function_calls></function_calls> tags",
    "lfm2": "<|im_start|>system\\nList of tools: [",
    "xlam": "<|start_header_id|>system<|end_header_id|> developed by Salesforce xLAM team ... 'ipython'",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_is_known_as_that_of_its_family_and_of_no_other(name):
    assert format_of(None, FRAGMENTS[name]) is FORMATS[name]


@pytest.mark.parametrize("family", [one for one in FAMILIES.values() if one.calls], ids=lambda family: family.name)
def test_whole_templates_are_known_as_those_of_their_families(family):
    assert format_of(None, family.template).name == family.calls
