"""Formats whose calls are written as Python calls functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

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
