"""Formats whose calls are elements with a name, and whose arguments are elements in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from paddock.environments.calls.format import blocks, written_value
from paddock.environments.environment import Call, Malformed

# Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>

CODER_FORM = "<function=NAME><parameter=KEY>VALUE</parameter></function>"


def read_coder(text: str) -> Iterator[Call | Malformed]:
    """Values are texts: the tool's schema says what they are."""
    if "<function=" not in text:
        for inner, unclosed in blocks(text, "<tool_call>", "</tool_call>"):
            yield unclosed or Malformed(inner, f"there is no <function=NAME> in it; write {CODER_FORM}")
    for inner, unclosed in blocks(text, "<function=", "</function>"):
        name, named, rest = inner.partition(">")
        if unclosed or not named or not name.strip():
            yield unclosed or Malformed(f"<function={inner}</function>", f"it names no tool; write {CODER_FORM}")
            continue
        arguments, wrong = {}, None
        for parameter, open_one in blocks(rest, "<parameter=", "</parameter>"):
            key, keyed, value = parameter.partition(">")
            if open_one or not keyed or not key.strip():
                wrong = open_one or Malformed(parameter, f"a parameter has no name; write {CODER_FORM}")
            arguments[key.strip()] = without_line_ends(value)
        yield wrong or Call(name.strip(), arguments)


def without_line_ends(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def render_coder(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        lines = [f"<parameter={key}>\n{written_value(value)}\n</parameter>\n" for key, value in call.arguments.items()]
        return f"<tool_call>\n<function={call.name}>\n{''.join(lines)}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


# GLM-4.5: <tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value></tool_call>

GLM_FORM = "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.S)


def read_glm(text: str) -> Iterator[Call | Malformed]:
    """Values are texts: the tool's schema says what they are."""
    for inner, unclosed in blocks(text, "<tool_call>", "</tool_call>"):
        name, opened, _ = inner.partition("<arg_key>")
        rest = inner[len(name) :] if opened else ""
        pairs = GLM_ARGUMENT.findall(rest)
        if unclosed or not name.strip() or "<" in name or GLM_ARGUMENT.sub("", rest):
            reason = "it names no tool" if not name.strip() else "its arguments cannot be read"
            yield unclosed or Malformed(f"<tool_call>{inner}</tool_call>", f"{reason}; write {GLM_FORM}")
        else:
            yield Call(name.strip(), {key.strip(): value for key, value in pairs})


def render_glm(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{written_value(value)}</arg_value>\n"
                 for key, value in call.arguments.items()]  # fmt: skip
        return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(map(one, calls))
