"""Formats whose calls are elements with a name, and whose arguments are elements in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from paddock.environments.calls.format import blocks, json_value, written_value
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


def read_glm(text: str) -> Iterator[Call | Malformed]:
    """Values are texts: the tool's schema says what they are."""
    for inner, unclosed in blocks(text, "<tool_call>", "</tool_call>"):
        name, _, _ = inner.partition("<arg_key>")
        arguments, rest = glm_arguments(inner[len(name) :])
        if unclosed or not name.strip() or "<" in name or rest:
            reason = "it names no tool" if not name.strip() else "its arguments cannot be read"
            yield unclosed or Malformed(f"<tool_call>{inner}</tool_call>", f"{reason}; write {GLM_FORM}")
        else:
            yield Call(name.strip(), arguments)


def glm_arguments(text: str) -> tuple[dict[str, str], str]:
    """Returns the arguments that a text begins with, and what stands behind them."""
    found: dict[str, str] = {}
    while (rest := text.lstrip()).startswith("<arg_key>"):
        key, keyed, behind = rest.removeprefix("<arg_key>").partition("</arg_key>")
        value, closed, text = behind.lstrip().partition("</arg_value>")
        if not keyed or not closed or not value.startswith("<arg_value>"):
            return found, rest
        found[key.strip()] = value.removeprefix("<arg_value>")
    return found, rest


def render_glm(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{written_value(value)}</arg_value>\n"
                 for key, value in call.arguments.items()]  # fmt: skip
        return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(map(one, calls))


# Elements with names between two marks: MiniMax M2, Seed-OSS, Step3, DeepSeek V3.2 and V4


@dataclass(frozen=True)
class Elements:
    """Reads and writes calls as elements, <invoke name="f"><parameter name="a">1</parameter></invoke>, between marks.

    Values are texts, and the tool's schema says what they are, unless they are `typed`. A text that holds the mark that
    closes it cannot be written: it is read as malformed.
    """

    opening: str
    """Text before all calls."""
    closing: str
    call: str = "invoke"
    """Tag of a call."""
    argument: str = "parameter"
    """Tag of an argument."""
    named: str = ' name="{}"'
    """How a tag is given a name."""
    before: str = ""
    """Text before each call."""
    after: str = "\n"
    """Text behind each call."""
    typed: bool = False
    """True: arguments say by string="true" or string="false" whether they are texts or JSON."""
    each: bool = False
    """True: each call has marks of its own."""

    @cached_property
    def form(self) -> str:
        arguments = self._argument("KEY", "VALUE")
        return f"{self.opening}{self._begun('NAME')}{arguments}</{self.call}>{self.closing}"

    def read(self, text: str) -> Iterator[Call | Malformed]:
        _, opened, text = text.partition(self.opening)
        if opened and not opening_tag(self.call).search(text):
            yield Malformed(self.opening + text, f"there is no <{self.call}> in it; write {self.form}")
        while opened and (begun := opening_tag(self.call).search(text)):
            body, closed, behind = text[begun.end() :].partition(f"</{self.call}>")
            yield self._call(name_in(begun[1]), body, begun[0] + body + closed, bool(closed))
            text = behind.lstrip().removeprefix(self.after.strip()).lstrip()
            if text.startswith(self.closing):
                _, opened, text = text.partition(self.opening)

    def _call(self, name: str, body: str, text: str, closed: bool) -> Call | Malformed:
        if not closed:
            return Malformed(text, f"<{self.call}> is not closed by </{self.call}>")
        if not name:
            return Malformed(text, f"it names no tool; write {self.form}")
        arguments: dict[str, Any] = {}
        while begun := opening_tag(self.argument).match(body := body.lstrip()):
            value, closing, body = body[begun.end() :].partition(f"</{self.argument}>")
            if not closing:
                return Malformed(text, f"<{self.argument}> is not closed by </{self.argument}>; write {self.form}")
            key = name_in(begun[1])
            arguments[key], wrong = json_value(value) if 'string="false"' in begun[1] else (value, None)
            if wrong:
                return Malformed(text, f"the argument {key} of {name}: {wrong}; write {self.form}")
        if body.strip():
            return Malformed(text, f"the arguments of {name} cannot be read; write {self.form}")
        return Call(name, arguments)

    def render(self, calls: Sequence[Call]) -> str:
        def one(call: Call) -> str:
            lines = "".join(f"{self._argument(key, value)}\n" for key, value in call.arguments.items())
            return f"{self.before}{self._begun(call.name)}\n{lines}</{self.call}>{self.after}"

        groups = [[call] for call in calls] if self.each else [calls]
        return "\n".join(f"{self.opening}\n{''.join(map(one, group))}{self.closing}" for group in groups)

    def _begun(self, name: str) -> str:
        return f"<{self.call}{self.named.format(name)}>"

    def _argument(self, key: str, value: Any) -> str:
        kind = f' string="{str(isinstance(value, str)).lower()}"' if self.typed else ""
        return f"<{self.argument}{self.named.format(key)}{kind}>{written_value(value)}</{self.argument}>"


@cache
def opening_tag(tag: str) -> re.Pattern[str]:
    """Returns a pattern of a tag with a name and what stands behind it."""
    return re.compile(rf"<{tag}(?:=|\s+name=)([^<>]*)>")


def name_in(given: str) -> str:
    """Returns the name that a tag is given, quoted or not."""
    given = given.strip()
    return (given[1:].partition(given[0])[0] if given.startswith(('"', "'")) else given).strip()


MINIMAX_M2 = Elements("<minimax:tool_call>", "</minimax:tool_call>")
SEED = Elements("<seed:tool_call>", "</seed:tool_call>", "function", named="={}", each=True)
STEP3 = Elements("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "steptml:invoke", "steptml:parameter",
                 before="<｜tool_call_begin｜>function<｜tool_sep｜>", after="<｜tool_call_end｜>\n")  # fmt: skip
DEEPSEEK_32, DEEPSEEK_4 = (
    Elements(f"<｜DSML｜{calls}>", f"</｜DSML｜{calls}>", "｜DSML｜invoke", "｜DSML｜parameter", typed=True)
    for calls in ("function_calls", "tool_calls")
)
