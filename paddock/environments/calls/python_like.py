"""Formats whose calls are written as Python calls functions."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from paddock.environments.calls.format import blocks, written_json
from paddock.environments.environment import Call, Malformed

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


def python_call(node: ast.AST, text: str, form: str = PYTHON_FORM, json_names: bool = False) -> Call | Malformed:
    """Returns a node of Python's syntax as a call; `json_names`: true, false and null are values too."""
    try:
        text = ast.get_source_segment(text, node) or text
        if not isinstance(node, ast.Call):
            return Malformed(text, f"this is no call; write {form}")
        name = ast.unparse(node.func)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return Malformed(text, f"the arguments of {name} must be named; write {form}")
        values = [JsonNames().visit(keyword.value) if json_names else keyword.value for keyword in node.keywords]
        arguments = {
            str(keyword.arg): ast.literal_eval(value) for keyword, value in zip(node.keywords, values, strict=True)
        }
        json.dumps(arguments, ensure_ascii=False).encode()  # sets, bytes and half surrogate pairs are no JSON
        return Call(name, arguments)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Malformed(text, "arguments must be numbers, texts, lists or dictionaries, written out")


# Python calls between two marks: LFM2 as a list, OLMo 3 one in each line


JSON_NAMES = {"true": True, "false": False, "null": None}


class JsonNames(ast.NodeTransformer):
    """Puts the values of JSON's names in place of the names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(JSON_NAMES[node.id]), node) if node.id in JSON_NAMES else node


@dataclass(frozen=True)
class Python:
    """Writes calls as Python calls functions, between two marks, and reads them: one in each line, or in lists."""

    opening: str = ""
    closing: str = ""
    before: str = "["
    between: str = ", "
    behind: str = "]"
    form: str = PYTHON_FORM
    value: Callable[[Any], str] = repr
    """Writes a value of an argument."""

    def render(self, calls: Sequence[Call]) -> str:
        def written(call: Call) -> str:
            return f"{call.name}({', '.join(f'{key}={self.value(value)}' for key, value in call.arguments.items())})"

        text = f"{self.before}{self.between.join(map(written, calls))}{self.behind}"
        for mark in filter(None, (self.opening, self.closing)):  # the first closing mark ends a block
            text = text.replace(mark, f"\\x{ord(mark[0]):02x}{mark[1:]}")
        return self.opening + text + self.closing

    def read(self, text: str) -> Iterator[Call | Malformed]:
        form = self.opening + self.form + self.closing
        for inner, unclosed in blocks(text, self.opening, self.closing):
            if unclosed:
                yield unclosed
                continue
            inner = dedent(inner).strip()
            try:
                lines = ast.parse(inner).body
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                said = getattr(error, "msg", None) or type(error).__name__
                yield Malformed(inner, f"the calls cannot be read: {said}; write {form}")
                continue
            nodes = [line.value if isinstance(line, ast.Expr) else line for line in lines]
            for node in nodes:
                for part in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
                    yield python_call(part, inner, form, json_names=True)
            if not nodes:
                yield Malformed(self.opening + self.closing, f"there is no call in it; write {form}")


LLAMA_4 = Python()
LFM = Python("<|tool_call_start|>", "<|tool_call_end|>")
OLMO = Python("<function_calls>", "</function_calls>", "", "\n", "", 'name(argument=1, other="text")', written_json)
