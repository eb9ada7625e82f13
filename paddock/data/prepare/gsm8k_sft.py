"""GSM8K's own answers for supervised training: as they read, or as conversations with a calculator.

The authors wrote every computation between `<<` and `>>`, as in `48/2 = <<48/2=24>>24 clips`. In the conversations each
is a call of the tool `calculator`: the assistant's turn ends there, and the next one begins with the result. Calls are
`tool_calls`, which the model's template writes, or plain text behind the prompt of `gsm8k_calculator`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paddock.data.prepare import gsm8k, gsm8k_tools
from paddock.data.prepare.preparer import Preparer, Row
from paddock.data.prepare.records import Record

COMPUTATION = re.compile(r"<<([^<>]*)=([^<>=]*)>>")
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "numbers, + - * / // % ** and parentheses, such as (3 + 4) * 2",
                }
            },
            "required": ["expression"],
        },
    },
}
"""Schema of the tool that comes with the package, as a run shows it to the policy."""


def plain_row(record: Record) -> Row:
    question, answer = asked_and_answered(record)
    return {"messages": [question, {"role": "assistant", "content": COMPUTATION.sub("", answer)}]}


def calculator_row(record: Record) -> Row:
    question, answer = asked_and_answered(record)

    def turn(text: str, expression: str) -> Row:
        call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": call}]}

    return conversation([question], answer, turn)


def text_row(record: Record) -> Row:
    asked = gsm8k_tools.calculator_row(record)

    def turn(text: str, expression: str) -> Row:
        return {"role": "assistant", "content": f"{text}\n{gsm8k_tools.CALL % expression}"}

    return conversation(asked["prompt"], asked["extra_info"]["answer"], turn)


def conversation(asked: Sequence[Mapping[str, Any]], answer: str, turn: Callable[[str, str], Row]) -> Row:
    """Returns the messages of a row; `turn` writes one that ends with a call."""
    *steps, last = pieces(answer)
    messages = [*asked]
    for text, expression, result in steps:
        messages += [turn(text.rstrip(), expression), {"role": "tool", "content": result}]
    messages.append({"role": "assistant", "content": last[0]})
    return {"messages": messages, "tools": json.dumps([CALCULATOR])}


def asked_and_answered(record: Record) -> tuple[Row, str]:
    """Returns the question as `paddock data gsm8k` asks it, and the authors' answer."""
    row = gsm8k.row(record)
    return dict(row["prompt"][0]), str(row["extra_info"]["answer"])


def pieces(answer: str) -> list[tuple[str, str, str]]:
    """Returns the texts of an answer, each with the expression and the result behind it; the last has neither."""
    parts = COMPUTATION.split(answer)
    return list(zip(parts[::3], [*parts[1::3], ""], [*map(number, parts[2::3]), ""], strict=True))


def number(text: str) -> str:
    """Returns a result as the calculator writes it: `.5` -> `0.5`, `1,200` -> `1200`"""
    plain = text.replace(",", "").strip()
    try:
        return plain if plain.isdecimal() else f"{float(plain):.12g}"
    except ValueError:
        return plain


COLUMNS = {
    "messages": [
        {
            "role": "string",
            "content": "string",
            "tool_calls": [{"type": "string", "function": {"name": "string", "arguments": "string"}}],
        }
    ]
}
CALCULATOR_COLUMNS = {**COLUMNS, "tools": "string"}
_kind = partial(Preparer, hub=gsm8k.SOURCE, config="main", next_command="sft")
PREPARERS = (
    _kind(name="gsm8k_sft", title="GSM8K for supervised training", row=plain_row, columns=COLUMNS),
    _kind(name="gsm8k_calculator_sft", title="GSM8K with a calculator, for supervised training",
          row=calculator_row, columns=CALCULATOR_COLUMNS),
    _kind(name="gsm8k_calculator_text_sft",
          title="GSM8K with a calculator called in plain text, for supervised training",
          row=text_row, columns=CALCULATOR_COLUMNS),
)  # fmt: skip
