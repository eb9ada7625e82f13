"""Tool calls in the formats that model families write: read from a turn of the policy, and written for data.

Nothing that a policy writes raises: a call that cannot be read becomes a `Malformed` whose reason helps to mend it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.core.registry import suggest
from paddock.environments.environment import Call, Malformed
from paddock.errors import UserError

KEY = "actor_rollout_ref.rollout.multi_turn.format"
Read = tuple[list[Call], list[Malformed]]
THINKING = re.compile(r"<think>.*?(?:</think>|$)", re.S)
OBJECT = '{"name": "...", "arguments": {...}}'


@dataclass(frozen=True)
class Format:
    """Holds how a family of models writes tool calls."""

    name: str
    read: Callable[[str], Iterator[Call | Malformed]]
    render: Callable[[Sequence[Call]], str]
    """Returns calls as the family writes them, without the end of the turn."""
    marks: tuple[str, ...]
    """Texts that stand in chat templates of the family, all of them."""

    def parse(self, text: str) -> Read:
        """Returns the calls in a turn, and those that cannot be read, in the order in which they were written.

        The turn is decoded with special tokens, without its end of turn. What stands in thinking is no call.
        """
        found = list(self.read(outside_thinking(text)))
        calls = [one for one in found if isinstance(one, Call)]
        return calls, [one for one in found if isinstance(one, Malformed)]


def outside_thinking(text: str) -> str:
    """Returns what stands outside <think>...</think>; the generation prompt may have opened it."""
    opened, closed = text.find("<think>"), text.find("</think>")
    if closed >= 0 and (opened < 0 or closed < opened):
        text = text[closed + len("</think>") :]
    return THINKING.sub("", text)


def call_of(value: Any, text: str, wrong: str | None = None) -> Call | Malformed:
    """Returns a JSON value as a call; `wrong` says why there is no value."""
    if wrong is not None:
        return Malformed(text, wrong)
    if not isinstance(value, dict):
        return Malformed(text, f"a call is an object {OBJECT}, and this is {kind_of(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return Malformed(text, f'the call has no "name" of a tool; write {OBJECT}')
    given = (value[key] for key in ("arguments", "parameters") if value.get(key) is not None)
    arguments: Any = next(given, {})
    return call_with(name, arguments, text, str(value.get("id") or ""))


def call_with(name: str, arguments: Any, text: str, identity: str = "") -> Call | Malformed:
    if isinstance(arguments, str):
        arguments, wrong = json_value(arguments)
        if wrong is not None:
            return Malformed(text, f"the arguments of {name.strip()}: {wrong}")
    if not isinstance(arguments, Mapping):
        return Malformed(
            text, f'the arguments of {name.strip()} are {kind_of(arguments)}, not an object {{"name": value}}'
        )
    return Call(name.strip(), arguments, identity)


def json_value(text: str) -> tuple[Any, str | None]:
    """Returns a JSON value, and what is wrong with the text if it is none."""
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, ensure_ascii=False).encode()
        return value, None
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        return None, f"the JSON cannot be read: {error.msg} at character {error.pos}, near {near!r}"
    except UnicodeEncodeError:
        return None, "the JSON holds half of a surrogate pair, which is no character"
    except (ValueError, RecursionError) as error:
        return None, f"the JSON cannot be read: {str(error) or type(error).__name__}"


def leading_json(text: str) -> tuple[Any, str | None, str]:
    """Returns the JSON value that a text begins with, what is wrong with it, and the text behind it."""
    text = text.lstrip()
    try:
        end = json.JSONDecoder(strict=False).raw_decode(text)[1]
    except (ValueError, RecursionError):
        end = len(text)
    return *json_value(text[:end]), text[end:]


def kind_of(value: Any) -> str:
    names: dict[type, str] = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text",
                              list: "a list", dict: "an object"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def blocks(text: str, opening: str, closing: str) -> Iterator[tuple[str, Malformed | None]]:
    """Yields what stands between two tags; a tag that is not closed is malformed, and what follows belongs to it."""
    for part in text.split(opening)[1:]:
        inner, closed, _ = part.partition(closing)
        yield inner, None if closed else Malformed(opening + part, f"{opening} is not closed by {closing}")


def object_of(call: Call, arguments: str = "arguments") -> dict[str, Any]:
    return {"name": call.name, arguments: dict(call.arguments)}


def written_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def written_value(value: Any) -> str:
    return value if isinstance(value, str) else written_json(value)


# Qwen2.5, Qwen3, Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>


def read_hermes(text: str) -> Iterator[Call | Malformed]:
    for inner, unclosed in blocks(text, "<tool_call>", "</tool_call>"):
        yield unclosed or call_of(*_json_of(inner, f"<tool_call>{inner}</tool_call>"))


def _json_of(inner: str, text: str) -> tuple[Any, str, str | None]:
    value, wrong = json_value(inner.strip())
    return value, text, wrong and f"{wrong}; write {OBJECT}"


def render_hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{written_json(object_of(call))}\n</tool_call>" for call in calls)


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


# Llama 3: {"name": ..., "parameters": {...}}, behind <|python_tag|> or not

PYTHON_TAG = "<|python_tag|>"
LLAMA_FORM = '{"name": "...", "parameters": {...}}'
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


def render_llama(calls: Sequence[Call]) -> str:
    return "; ".join(written_json(object_of(call, "parameters")) for call in calls)


# Llama 4 and others: [f(a=1), g(b="x")]

PYTHON_FORM = '[name(argument=1, other="text")]'
PYTHON_START = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")


def read_python(text: str) -> Iterator[Call | Malformed]:
    text = text.replace("<|python_start|>", "").replace("<|python_end|>", "").strip()
    if not PYTHON_START.match(text):
        return
    try:
        listed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = getattr(error, "msg", None) or type(error).__name__
        yield Malformed(text, f"the list of calls cannot be read: {said}; write {PYTHON_FORM} and nothing behind it")
        return
    for node in listed.elts if isinstance(listed, ast.List) else [listed]:
        yield python_call(node, text)


def python_call(node: ast.expr, text: str) -> Call | Malformed:
    try:
        text = ast.get_source_segment(text, node) or text
        if not isinstance(node, ast.Call):
            return Malformed(text, f"this is no call; write {PYTHON_FORM}")
        name = ast.unparse(node.func)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return Malformed(text, f"the arguments of {name} must be named; write {PYTHON_FORM}")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        repr(arguments).encode()
        return Call(name, arguments)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Malformed(text, "arguments must be numbers, texts, lists or dictionaries, written out")


def render_python(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"

    return f"[{', '.join(map(one, calls))}]"


# Lists of objects behind a mark: Phi-4, Granite, Mistral up to v7


def listed_calls(text: str) -> Iterator[Call | Malformed]:
    value, wrong, _ = leading_json(text)
    if wrong or not isinstance(value, list):
        yield call_of(value, text, wrong and f"{wrong}; write [{OBJECT}]")
        return
    for one in value:
        yield call_of(one, written_json(one))


def read_phi(text: str) -> Iterator[Call | Malformed]:
    for inner, unclosed in blocks(text, "<|tool_call|>", "<|/tool_call|>"):
        yield from [unclosed] if unclosed else listed_calls(inner)
    for inner in text.split("functools[")[1:]:
        yield from listed_calls(f"[{inner}")


def render_phi(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{written_json([object_of(call) for call in calls])}<|/tool_call|>"


def read_granite(text: str) -> Iterator[Call | Malformed]:
    for inner in re.split(r"<\|tool_call\|>|<tool_call>", text)[1:]:
        yield from listed_calls(inner)


def render_granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{written_json([object_of(call) for call in calls])}"


# Mistral: [TOOL_CALLS][{...}], and [TOOL_CALLS]name[ARGS]{...} since v11

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


def render_mistral(calls: Sequence[Call]) -> str:
    objects = [object_of(call) | ({"id": call.id} if call.id else {}) for call in calls]
    return f"[TOOL_CALLS]{written_json(objects)}"


# DeepSeek V3, R1, V3.1

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
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


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


LISTED = [
    Format("gpt_oss", read_harmony, render_harmony, ("<|channel|>", "functions.")),
    Format("qwen3_coder", read_coder, render_coder, ("<function=",)),
    Format("glm45", read_glm, render_glm, ("<arg_key>",)),
    Format("deepseek_v3", read_deepseek, render_deepseek, ("tool▁call▁begin",)),
    Format("mistral", read_mistral, render_mistral, ("[TOOL_CALLS]",)),
    Format("phi4", read_phi, render_phi, ("<|tool|>", "<|/tool|>")),
    Format("granite", read_granite, render_granite, ("<|tool_call|>",)),
    Format("hermes", read_hermes, render_hermes, ("<tool_call>",)),
    Format("llama3_json", read_llama, render_llama, ("<|start_header_id|>", "ipython")),
    Format("pythonic", read_python, render_python, ("<|python_start|>",)),
]
FORMATS: dict[str, Format] = {one.name: one for one in LISTED}
"""Formats by name, in the order in which they are looked for in a template."""
OTHER_NAMES = {
    "qwen25": "hermes", "qwen": "hermes", "qwen2_5": "hermes", "qwen3": "hermes", "openai": "gpt_oss",
    "harmony": "gpt_oss", "llama3": "llama3_json", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic",
    "llama4": "pythonic", "deepseekv3": "deepseek_v3", "deepseek_v31": "deepseek_v3", "deepseekv31": "deepseek_v3",
    "glm": "glm45", "glm4_5": "glm45", "phi4_mini_json": "phi4", "granite_20b_fc": "granite",
}  # fmt: skip
"""Names of other systems for the same formats."""


def format_of(name: str | None, template: str | None) -> Format:
    """Returns the format of this name; without one, the format that the chat template shows, else hermes."""
    if name is None:
        shown = (one for one in LISTED if template and all(mark in template for mark in one.marks))
        return next(shown, FORMATS["hermes"])
    plain = name.strip().lower().replace("-", "_").replace(".", "_")
    found = FORMATS.get(OTHER_NAMES.get(plain, plain))
    if found is None:
        raise UserError("no such format of tool calls", key=KEY, value=name, fix=suggest(plain, [*FORMATS]))
    return found
