"""Formats whose calls are JSON, behind a mark or between two."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paddock.environments.calls.format import (
    OBJECT,
    Objects,
    blocks,
    call_of,
    call_with,
    headed_calls,
    json_blocks,
    json_value,
    leading_json,
    object_with_id,
    written_json,
)
from paddock.environments.calls.python_like import read_python
from paddock.environments.environment import Call, Malformed

# Qwen2.5, Qwen3, Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>


HERMES = Objects("<tool_call>", "</tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n")


def read_hermes(text: str) -> Iterator[Call | Malformed]:
    for inner, unclosed in json_blocks(text, HERMES.opening, HERMES.closing):
        value, wrong = json_value(inner.strip())
        yield unclosed or call_of(value, f"<tool_call>{inner}</tool_call>", wrong and f"{wrong}; write {OBJECT}")


# Llama 3: {"name": ..., "parameters": {...}}, behind <|python_tag|> or not

PYTHON_TAG = "<|python_tag|>"
LLAMA_FORM = '{"name": "...", "parameters": {...}}'


def with_parameters(number: int, call: Call) -> dict[str, Any]:
    return {"name": call.name, "parameters": dict(call.arguments)}


LLAMA = Objects(before="", between="; ", behind="", made=with_parameters)
BUILTIN = re.compile(r"\s*(\w+)\.call\((.*)\)\s*", re.S)


def read_llama(text: str) -> Iterator[Call | Malformed]:
    _, tagged, behind = text.partition(PYTHON_TAG)
    rest = (behind if tagged else text).strip()
    if tagged and (builtin := BUILTIN.fullmatch(rest)):
        yield from read_python(f"[{builtin[1]}({builtin[2]})]")
        return
    while rest and (tagged or rest.startswith("{")):
        value, wrong, behind = leading_json(rest)
        named = isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)
        meant = '"name"' in rest and ('"parameters"' in rest or '"arguments"' in rest)
        if not tagged and not named and not (wrong and meant):
            return  # a JSON text that is no call
        yield call_of(value, rest, wrong and f"{wrong}; write {LLAMA_FORM}")
        rest = "" if wrong else behind.strip().removeprefix(";").strip().removeprefix(PYTHON_TAG).strip()
        tagged = tagged if rest.startswith("{") else ""


# Lists of objects behind a mark: Phi-4, Granite, Mistral up to v7


PHI, GRANITE = Objects("<|tool_call|>", "<|/tool_call|>"), Objects("<|tool_call|>")


def listed_calls(text: str) -> Iterator[Call | Malformed]:
    value, wrong, _ = leading_json(text)
    if wrong or not isinstance(value, list):
        yield call_of(value, text, wrong and f"{wrong}; write [{OBJECT}]")
        return
    for each in value:
        yield call_of(each, written_json(each))


def read_phi(text: str) -> Iterator[Call | Malformed]:
    for inner, unclosed in json_blocks(text, PHI.opening, PHI.closing):
        yield from [unclosed] if unclosed else listed_calls(inner)
    for inner in text.split("functools[")[1:]:
        yield from listed_calls(f"[{inner}")


def read_granite(text: str) -> Iterator[Call | Malformed]:
    for inner in re.split(r"<\|tool_call\|>|<tool_call>", text)[1:]:
        yield from listed_calls(inner)


# Mistral: [TOOL_CALLS][{...}], and [TOOL_CALLS]name[ARGS]{...} since v11

MISTRAL = Objects("[TOOL_CALLS]", made=object_with_id)
MISTRAL_FORM = "[TOOL_CALLS]name[ARGS]{...}"


def read_mistral(text: str) -> Iterator[Call | Malformed]:
    for part in text.split("[TOOL_CALLS]")[1:]:
        if part.lstrip().startswith(("[{", "[]", "{")) or re.match(r"\s*\[\s*\{", part):
            yield from listed_calls(part)
            continue
        head, split, arguments = part.partition("[ARGS]")
        if not split and "{" in part:
            head, arguments = part[: part.index("{")], part[part.index("{") :]
        name, _, identity = head.partition("[CALL_ID]")
        whole = f"[TOOL_CALLS]{part}"
        value, wrong, _ = leading_json(arguments)
        if not name.strip():
            yield Malformed(whole, f"it names no tool; write {MISTRAL_FORM}")
        elif wrong:
            yield Malformed(whole, f"the arguments of {name.strip()}: {wrong}; write {MISTRAL_FORM}")
        else:
            yield call_with(name, value, whole, identity.strip())


# DeepSeek V3, R1, V3.1

DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_FORM = f"{BEGIN}function{SEPARATOR}NAME and then a block ```json with the arguments"


def read_deepseek(text: str) -> Iterator[Call | Malformed]:
    for inner, unclosed in blocks(text, BEGIN, END):
        head, split, rest = inner.partition(SEPARATOR)
        whole = f"{BEGIN}{inner}{END}"
        name, fenced, arguments = rest.partition("```json")
        if unclosed or not split:
            yield unclosed or Malformed(whole, f"there is no {SEPARATOR}; write {DEEPSEEK_FORM}")
            continue
        if not fenced:  # V3.1: the name stands before the separator
            name, arguments = head, rest
        value, wrong = json_value(arguments.strip().removesuffix("```").strip())
        if not name.strip() or wrong:
            yield Malformed(whole, f"{wrong or 'it names no tool'}; write {DEEPSEEK_FORM}")
        else:
            yield call_with(name, value, whole)


def render_deepseek(calls: Sequence[Call]) -> str:
    written = [
        f"{BEGIN}function{SEPARATOR}{call.name}\n```json\n{written_json(dict(call.arguments))}\n```{END}"
        for call in calls
    ]
    return DEEPSEEK_CALLS[0] + "\n".join(written) + DEEPSEEK_CALLS[1]


# DeepSeek V3.1: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

DEEPSEEK_31_FORM = f"{BEGIN}NAME{SEPARATOR}{{...}}{END}"


def read_deepseek_31(text: str) -> Iterator[Call | Malformed]:
    def call(name: str, arguments: Any, whole: str) -> Call | Malformed:
        reason = f"it names no tool; write {DEEPSEEK_31_FORM}"
        return call_with(name, arguments, whole) if name else Malformed(whole, reason)

    return headed_calls(text, BEGIN, SEPARATOR, END, DEEPSEEK_31_FORM, call)


def render_deepseek_31(calls: Sequence[Call]) -> str:
    written = (f"{BEGIN}{call.name}{SEPARATOR}{written_json(dict(call.arguments))}{END}" for call in calls)
    return DEEPSEEK_CALLS[0] + "".join(written) + DEEPSEEK_CALLS[1]


# Kimi K2: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>

KIMI_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_BEGIN, KIMI_MIDDLE, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_FORM = f"{KIMI_BEGIN}functions.NAME:0{KIMI_MIDDLE}{{...}}{KIMI_END}"
KIMI_ID = re.compile(r"(?:functions\.)?(\S+):\d+")


def read_kimi(text: str) -> Iterator[Call | Malformed]:
    def call(identity: str, arguments: Any, whole: str) -> Call | Malformed:
        if named := KIMI_ID.fullmatch(identity):
            return call_with(named[1], arguments, whole, identity)
        return Malformed(whole, f"{identity!r} is no name of a tool with a number; write {KIMI_FORM}")

    return headed_calls(text, KIMI_BEGIN, KIMI_MIDDLE, KIMI_END, KIMI_FORM, call)


def render_kimi(calls: Sequence[Call]) -> str:
    def one(number: int, call: Call) -> str:
        named = KIMI_ID.fullmatch(call.id)
        identity = call.id if named and named[1] == call.name else f"functions.{call.name}:{number}"
        return f"{KIMI_BEGIN}{identity}{KIMI_MIDDLE}{written_json(dict(call.arguments))}{KIMI_END}"

    written = "".join(one(number, call) for number, call in enumerate(calls))
    return f"{KIMI_CALLS[0]}{written}{KIMI_CALLS[1]}"


# Between two marks: Hunyuan A13B, Jamba and Apriel a list, MiniMax M1 an object in each line


HUNYUAN = Objects("<tool_calls>", "</tool_calls>", made=object_with_id)
MINIMAX_M1 = Objects("<tool_calls>", "</tool_calls>", "\n", "\n", "\n")
NEMOTRON = Objects("<TOOLCALL>", "</TOOLCALL>", form=f"[{OBJECT}]")

# InternLM: <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>

PLUGIN, PLUGIN_END = "<|action_start|><|plugin|>", "<|action_end|>"
INTERNLM = Objects(PLUGIN, PLUGIN_END, "\n", f"{PLUGIN_END}{PLUGIN}\n", "", LLAMA_FORM, with_parameters)


def read_internlm(text: str) -> Iterator[Call | Malformed]:
    return INTERNLM.read(re.sub(r"<\|action_start\|>\s+<\|plugin\|>", PLUGIN, text))


# Cohere: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>

COHERE_OBJECT = '{"tool_name": "...", "parameters": {...}}'


def cohere_call(value: Any, text: str) -> Call | Malformed:
    return call_of(value, text, form=COHERE_OBJECT, name_key="tool_name", id_key="tool_call_id")


def cohere_object(number: int, call: Call) -> dict[str, Any]:
    identity = {"tool_call_id": call.id or str(number)}
    return identity | {"tool_name": call.name, "parameters": dict(call.arguments)}


COHERE = Objects("<|START_ACTION|>", "<|END_ACTION|>", "[\n    ", ",\n    ", "\n]", f"[{COHERE_OBJECT}]",
                 cohere_object, cohere_call)  # fmt: skip

# Command-R and R+: Action: and a block of JSON

ACTION = re.compile(r"Action:\s*```(?:json)?")
ANSWERS = ("directly-answer", "directly_answer")
"""Names of the tool that the family calls to say that it needs none."""


def read_command_r(text: str) -> Iterator[Call | Malformed]:
    while begun := ACTION.search(text):
        value, wrong, text = leading_json(text[begun.end() :])
        if wrong:
            yield Malformed(begun[0], f"{wrong}; write Action: and a block ```json with [{COHERE_OBJECT}]")
            continue
        for one in value if isinstance(value, list) else [value]:
            call = cohere_call(one, written_json(one))
            if isinstance(call, Malformed) or call.name not in ANSWERS:
                yield call


def render_command_r(calls: Sequence[Call]) -> str:
    objects = [{"tool_name": call.name, "parameters": dict(call.arguments)} for call in calls]
    return f"Action:\n```json\n{json.dumps(objects, ensure_ascii=False, indent=4)}```"


# xLAM: [{"name": ..., "arguments": {...}}], as the whole turn or in a block of JSON


def read_xlam(text: str) -> Iterator[Call | Malformed]:
    rest = text.strip()
    if not rest.startswith("["):
        rest = rest.partition("```json")[2].lstrip()
    if not rest.startswith("[") or '"name"' not in rest or '"arguments"' not in rest:
        return
    value, wrong, _ = leading_json(rest)
    if wrong:
        yield Malformed(rest, f"{wrong}; write [{OBJECT}]")
    elif any(isinstance(one, dict) and "name" in one and "arguments" in one for one in value):
        for one in value:
            yield call_of(one, written_json(one))


# gpt-oss: <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}

HARMONY_FORM = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}"
HARMONY_TO = re.compile(r"to=functions\.([^\s<]*)")


def read_harmony(text: str) -> Iterator[Call | Malformed]:
    for part in text.split("<|start|>"):
        header, split, body = part.partition("<|message|>")
        named = HARMONY_TO.search(header)
        if not named:
            continue
        value, wrong = json_value(re.split(r"<\|(?:call|end|return)\|>", body)[0].strip() or "{}")
        if not split or not named[1]:
            yield Malformed(part, f"it has no name or no <|message|>; write {HARMONY_FORM}")
        elif wrong:
            yield Malformed(part, f"the arguments of {named[1]}: {wrong}; write {HARMONY_FORM}")
        else:
            yield call_with(named[1], value, part)


def render_harmony(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        arguments = written_json(dict(call.arguments))
        return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{arguments}"

    return "<|end|><|start|>assistant".join(map(one, calls))
